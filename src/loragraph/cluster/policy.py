"""Which replica gets a request: pure, and the same for whoever asks with the same figures.

Rendezvous hashing gives each adapter an order of all replicas, in which a replica that joins or
leaves moves only what it gains or had. `Affine` follows that order as far as a replica has room:
a cold adapter stays on the first, a hot one spreads over as many as its load needs, and goes back
to the first when the load has gone. The other policies are what it is compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.cluster.fleet import AdapterKey, Fleet, hash_of, rendezvous
from loragraph.errors import CapacityError, ConfigError

_N_CHOICES = 2


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What a policy needs to know of a request."""

    request_id: str  # seeds what is random
    adapters: frozenset[AdapterKey] = frozenset()  # empty: the base
    prefix: str = ""  # a fingerprint of how the prompt begins; empty: not known
    catalogue_version: int = 0  # at which its names were resolved


@dataclass(frozen=True, slots=True)
class Route:
    """Replicas in the order in which to try them, as indices into the fleet's ids."""

    order: NDArray[np.intp]  # (n_eligible,)
    by: AdapterKey | None  # the adapter whose order it is; None: of none

    def ids(self, fleet: Fleet) -> list[str]:
        """The same as names."""
        return [fleet.ids[i] for i in self.order]


class Policy(ABC):
    """A rule for the order of replicas."""

    name: str

    def route(self, request: RequestKey, fleet: Fleet) -> Route:
        """All replicas that take new work, best first; CapacityError where there is none."""
        eligible = fleet.eligible()
        if not len(eligible):
            raise CapacityError(
                f"expected a replica that takes requests, got {len(fleet.ids)} draining",
                hint="try again when a replica has started",
            )
        return self._route(request, fleet, eligible)

    @abstractmethod
    def _route(
        self, request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]
    ) -> Route: ...  # pragma: no cover


class Random(Policy):
    """Anywhere, whatever the load; drawn by the request's id."""

    name = "random"

    def _route(self, request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]) -> Route:
        return Route(_by_hash(hash_of(request.request_id), fleet, eligible), None)


class Hash(Policy):
    """The first replica in the order of the mix, whatever its load; the base goes anywhere."""

    name = "hash"

    def _route(self, request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]) -> Route:
        if not request.adapters:
            return Route(_by_hash(hash_of(request.request_id), fleet, eligible), None)
        key = "\n".join(sorted(adapter.name for adapter in request.adapters))
        return Route(_by_hash(hash_of(key), fleet, eligible), min(request.adapters))


class Sticky(Policy):
    """Affinity without spill: where all its adapters are, whatever the load there.

    Else the less loaded of two random choices, which then holds them.
    """

    name = "affinity without spill"

    def _route(self, request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]) -> Route:
        order = _two_choices(request, fleet, eligible)
        held = [fleet.holders(adapter) for adapter in request.adapters]
        if not held:
            return Route(order, None)
        everywhere = set.intersection(*map(set, held))
        key = hash_of("\n".join(sorted(adapter.name for adapter in request.adapters)))
        there = [i for i in _by_hash(key, fleet, eligible).tolist() if i in everywhere]
        rest = [i for i in order.tolist() if i not in everywhere]
        return Route(np.array(there + rest, np.intp), min(request.adapters))


@dataclass(frozen=True, slots=True)
class AffineOptions:
    """The bounds of `Affine`. A load is running and queued requests over what runs at once."""

    max_relative: float = 1.25  # times the mean load: more than that is busy
    min_load: float = 0.5  # below it nobody is busy, whatever the mean
    max_load: float = 1.0  # from here on a request would queue: busy as long as others have room
    reach: int = 4  # of the first replicas with room, the warmest is taken

    def __post_init__(self) -> None:
        for field, good in (
            ("max_relative", self.max_relative >= 1),
            ("min_load", 0 <= self.min_load <= self.max_load),
            ("max_load", 0 < self.max_load < float("inf")),
            ("reach", self.reach >= 1),
        ):
            if not good:
                raise ConfigError(
                    "expected max_relative >= 1, 0 <= min_load <= max_load and reach >= 1, "
                    f"got {getattr(self, field)!r}",
                    field=field,
                )


class Affine(Policy):
    """Consistent order with bounded loads.

    A replica has room below the bound max(min_load, max_relative * mean), and below max_load. Of
    the first `reach` replicas with room in the adapter's order, one that has the mix's adapters
    and the prefix goes first; equals keep the order, or go by load where an adapter has to be
    loaded anyway. Then come the others with room, then those
    that would queue but are not above the bound, all in that order; then the rest by load.

    The order of a mix is that of its most constrained adapter: the one that the fewest replicas
    hold, but at least one, since only there does it need no load, while one that many hold is
    likely to be there too. One that nobody holds has to be loaded wherever the request goes.
    Where nobody holds any: the first by name.

    The base goes to the less loaded of two random replicas, or to the one of them that has the
    prefix, unless it is busy.
    """

    name = "affinity with spill"

    def __init__(self, options: AffineOptions | None = None) -> None:
        self.options = options or AffineOptions()

    def _route(self, request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]) -> Route:
        bound = max(
            self.options.min_load, self.options.max_relative * float(fleet.loads[eligible].mean())
        )
        room = fleet.loads < min(bound, self.options.max_load)
        if not request.adapters:
            order = _two_choices(request, fleet, eligible)
            return Route(self._warm_first(request, fleet, order, room, _N_CHOICES), None)
        driver = self._most_constrained(request.adapters, fleet)
        order = _with_room_first(fleet.order_of(driver.name), fleet.loads, room, bound)
        return Route(self._warm_first(request, fleet, order, room, self.options.reach), driver)

    def _most_constrained(self, adapters: Iterable[AdapterKey], fleet: Fleet) -> AdapterKey:
        def rank(adapter: AdapterKey) -> tuple[bool, int, AdapterKey]:
            n = fleet.n_holders(adapter)
            return (n == 0, n, adapter)

        return min(adapters, key=rank)

    def _warm_first(
        self,
        request: RequestKey,
        fleet: Fleet,
        order: NDArray[np.intp],
        room: NDArray[np.bool_],
        reach: int,
    ) -> NDArray[np.intp]:
        """The first `reach` of `order`, as far as they have room, with the warmest in front."""
        head = [i for i in order[:reach].tolist() if room[i]]
        if len(head) < _N_CHOICES:
            return order
        head.sort(key=lambda i: self._coldness(request, fleet, i))
        out = order.copy()
        out[: len(head)] = head
        return out

    def _coldness(self, request: RequestKey, fleet: Fleet, i: int) -> tuple[int, bool, bool, float]:
        """Adapters to load, whether the prefix has to be computed, whether the catalogue is old.

        Then the load, but only of replicas that lack an adapter: it stays where it is loaded, so
        that is the moment to balance. A lesser load elsewhere is no reason to leave the first.
        """
        missing = sum(i not in fleet.holders(adapter) for adapter in request.adapters)
        return (
            missing,
            not request.prefix or not fleet.has_prefix(i, request.prefix),
            int(fleet.versions[i]) < request.catalogue_version,
            float(fleet.loads[i]) if missing else 0.0,
        )


POLICIES: dict[str, type[Policy]] = {one.name: one for one in (Random, Hash, Sticky, Affine)}
"""By name."""


def _by_hash(key: int, fleet: Fleet, eligible: NDArray[np.intp]) -> NDArray[np.intp]:
    """The eligible ones in the rendezvous order of a key."""
    return eligible[rendezvous(key, fleet.hashes[eligible])]


def _two_choices(request: RequestKey, fleet: Fleet, eligible: NDArray[np.intp]) -> NDArray[np.intp]:
    """A random order by the request's id, with the less loaded of the first two in front."""
    order = _by_hash(hash_of(request.request_id), fleet, eligible)
    if len(order) >= _N_CHOICES and fleet.loads[order[1]] < fleet.loads[order[0]]:
        order[:2] = order[1::-1]
    return order


def _with_room_first(
    order: NDArray[np.intp], loads: NDArray[np.float64], room: NDArray[np.bool_], bound: float
) -> NDArray[np.intp]:
    """Those with room, those that would queue below the bound, the rest by load."""
    has_room = room[order]
    queues = ~has_room & (loads[order] < bound)
    rest = order[~has_room & ~queues]
    by_load = rest[np.argsort(loads[rest], kind="stable")]
    return np.concatenate((order[has_room], order[queues], by_load))
