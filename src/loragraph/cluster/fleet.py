"""All replicas as a router sees them: figures in arrays, and who holds what. Not for threads."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import ConfigError

_MAX_ORDERS = 4096  # kept, of 8 bytes a replica
_NOBODY: frozenset[int] = frozenset()

K = TypeVar("K")


class AdapterKey(NamedTuple):
    """A generation of a name."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a replica last said of itself."""

    id: str
    load: float = 0.0  # (running + queued requests) / requests that run at once
    resident: Set[AdapterKey] = frozenset()
    draining: bool = False  # takes no new work
    catalogue_version: int = 0
    prefixes: Set[str] = frozenset()  # fingerprints that it is likely to have


class Fleet:
    """Replicas by index; indices hold until one joins or leaves."""

    def __init__(self, views: Iterable[ReplicaView] = ()) -> None:
        """ConfigError for two of one id, or a load that is no number of 0 or more."""
        self._views: dict[str, ReplicaView] = {}
        for view in views:
            if view.id in self._views:
                raise ConfigError(f"expected ids that differ, got {view.id!r} twice", field="id")
            self._views[view.id] = _checked(view)
        self._rebuild()

    def put(self, view: ReplicaView) -> None:
        """Replaces what is known of a replica, or lets it join."""
        old = self._views.get(_checked(view).id)
        self._views[view.id] = view
        if old is None:
            self._rebuild()
            return
        self._fill(self._index[view.id], view)
        if old.draining != view.draining:
            self._orders.clear()
            self._eligible = np.flatnonzero(~self.draining)

    def remove(self, id_: str) -> None:
        """A replica has gone; one that is not known is none of it."""
        if self._views.pop(id_, None) is not None:
            self._rebuild()

    def set_load(self, index: int, load: float) -> None:
        """The load alone, between two reports."""
        self.loads[index] = load

    def hold(self, index: int, adapter: AdapterKey) -> None:
        """A replica holds one more adapter, or is about to."""
        self._adapters.add(index, adapter)

    def release(self, index: int, adapter: AdapterKey) -> None:
        """A replica holds an adapter no more."""
        self._adapters.discard(index, adapter)

    def learn_prefix(self, index: int, prefix: str) -> None:
        """A replica is likely to have a prefix."""
        self._prefixes.add(index, prefix)

    def forget_prefix(self, index: int, prefix: str) -> None:
        """A replica has it no more."""
        self._prefixes.discard(index, prefix)

    def index(self, id_: str) -> int:
        """Where a replica stands; KeyError for one that is not known."""
        return self._index[id_]

    def holders(self, adapter: AdapterKey) -> Set[int]:
        """Indices of the replicas that hold an adapter, draining ones too."""
        return self._adapters.of(adapter)

    def n_holders(self, adapter: AdapterKey) -> int:
        """How many hold it and take new work."""
        return sum(not self.draining[i] for i in self.holders(adapter))

    def has_prefix(self, index: int, prefix: str) -> bool:
        """Whether a replica is likely to have it."""
        return index in self._prefixes.of(prefix)

    def eligible(self) -> NDArray[np.intp]:
        """Indices of those that take new work."""
        return self._eligible

    def order_of(self, name: str) -> NDArray[np.intp]:
        """The eligible ones in the order of an adapter's name. By name, not by generation.

        So a new generation comes to where the old one was, and nothing else moves.
        """
        found = self._orders.get(name)
        if found is not None:
            self._orders.move_to_end(name)
            return found
        eligible = self.eligible()
        order = eligible[rendezvous(hash_of(name), self.hashes[eligible])]
        self._orders[name] = order
        if len(self._orders) > _MAX_ORDERS:
            self._orders.popitem(last=False)
        return order

    def _rebuild(self) -> None:
        """Sorted by id, so that what came first changes nothing."""
        self.ids = sorted(self._views)
        self._index = {id_: i for i, id_ in enumerate(self.ids)}
        self.hashes = np.array([hash_of(id_) for id_ in self.ids], np.uint64)
        self.loads = np.zeros(len(self.ids))
        self.draining = np.zeros(len(self.ids), bool)
        self.versions = np.zeros(len(self.ids), np.int64)
        self._adapters: _Holdings[AdapterKey] = _Holdings(len(self.ids))
        self._prefixes: _Holdings[str] = _Holdings(len(self.ids))
        self._orders: OrderedDict[str, NDArray[np.intp]] = OrderedDict()
        for i, id_ in enumerate(self.ids):
            self._fill(i, self._views[id_])
        self._eligible = np.flatnonzero(~self.draining)

    def _fill(self, index: int, view: ReplicaView) -> None:
        self.loads[index] = view.load
        self.draining[index] = view.draining
        self.versions[index] = view.catalogue_version
        self._adapters.set(index, view.resident)
        self._prefixes.set(index, view.prefixes)


def hash_of(key: str) -> int:
    """64 bits of a text, the same in every process."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rendezvous(key: int, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    """The order of a key over nodes: highest random weight first; (n,) indices into `hashes`.

    The weight is the finaliser of splitmix64 over key xor node, so each node's depends on no other.
    """
    z = (hashes ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.argsort(~z, kind="stable")


def _checked(view: ReplicaView) -> ReplicaView:
    if not 0 <= view.load < float("inf"):
        raise ConfigError(f"expected a load of 0 or more, got {view.load!r}", field="load")
    return view


class _Holdings(Generic[K]):
    """Which replica has which keys, looked up from both sides."""

    def __init__(self, n_replicas: int) -> None:
        self._own: list[set[K]] = [set() for _ in range(n_replicas)]
        self._holders: dict[K, set[int]] = {}

    def of(self, key: K) -> Set[int]:
        return self._holders.get(key, _NOBODY)

    def add(self, index: int, key: K) -> None:
        self._own[index].add(key)
        self._holders.setdefault(key, set()).add(index)

    def discard(self, index: int, key: K) -> None:
        if key not in self._own[index]:
            return
        self._own[index].remove(key)
        holders = self._holders[key]
        holders.remove(index)
        if not holders:
            del self._holders[key]

    def set(self, index: int, keys: Set[K]) -> None:
        """Makes a replica's keys exactly these."""
        for key in self._own[index] - keys:
            self.discard(index, key)
        for key in keys - self._own[index]:
            self.add(index, key)
