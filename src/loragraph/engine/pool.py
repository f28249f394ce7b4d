"""Which adapters are in memory: slots, bytes, who uses what, what is dropped next. Pure.

A ticket is one request's (or pin's) hold on the adapters of its mix. It is given all of them or
none, so two tickets never wait for each other. From then on none of its adapters is dropped until
it is released, those that are still loading included: what was loaded for a request is there when
the request runs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, KeysView, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from loragraph.errors import CapacityError, LoragraphError, MixTooLargeError

K = TypeVar("K", bound=Hashable)

RETRY_SECONDS = 5.0
"""A failed load is answered with the same error for so long, without reading the file again."""

_MAX_FAILURES = 1024


class Grant(Enum):
    """The answer to a ticket's wish."""

    READY = "ready"  # all are in memory
    LOADING = "loading"  # all have their places, some are on their way
    BLOCKED = "blocked"  # no room now; the ticket holds nothing


class State(Enum):
    """Where an adapter is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True)
class PoolStats:
    """Events since the start, and what is held now."""

    n_loads: int = 0
    load_seconds: float = 0.0
    n_hits: int = 0  # adapters wanted by a ticket that were in memory
    n_misses: int = 0  # adapters wanted by a ticket that had to be loaded, or were being loaded
    n_evictions: int = 0
    n_failures: int = 0
    n_resident: int = 0
    n_loading: int = 0
    n_in_use: int = 0  # adapters that some ticket holds
    n_tickets: int = 0
    nbytes: int = 0  # of the resident, and reserved for the loading ones


@dataclass(slots=True)
class _Entry(Generic[K]):
    nbytes: int
    loading: bool = True
    started: float = 0.0
    retired: bool = False
    tickets: set[Hashable] = field(default_factory=set)


class Pool(Generic[K]):
    """At most `n_slots` adapters and `max_bytes` bytes of them (None: no limit but the slots).

    `clock` gives seconds; `evict` is told of each adapter that leaves, at once. What is to be
    loaded stands in `to_load`, oldest first; the caller takes it out and reports the end with
    `loaded` or `failed`.
    """

    def __init__(
        self,
        n_slots: int,
        max_bytes: int | None,
        clock: Callable[[], float],
        evict: Callable[[K], None],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.n_slots = n_slots
        self.max_bytes = max_bytes
        self.to_load: deque[K] = deque()
        self._clock = clock
        self._evict = evict
        self._retry_seconds = retry_seconds
        self._stats = PoolStats()
        self._entries: dict[K, _Entry[K]] = {}
        self._idle: OrderedDict[K, None] = OrderedDict()  # resident, unheld; least recent first
        self._tickets: dict[Hashable, tuple[K, ...]] = {}
        self._pins: set[Hashable] = set()
        self._failures: dict[K, tuple[float, LoragraphError]] = {}
        self._nbytes = 0

    @property
    def stats(self) -> PoolStats:
        """A copy of the counters, with the present numbers."""
        entries = self._entries.values()
        out = PoolStats(**{name: getattr(self._stats, name) for name in PoolStats.__slots__})
        out.n_loading = sum(entry.loading for entry in entries)
        out.n_resident = len(self._entries) - out.n_loading
        out.n_in_use = sum(bool(entry.tickets) for entry in entries)
        out.n_tickets = len(self._tickets)
        out.nbytes = self._nbytes
        return out

    def state(self, key: K) -> State:
        """Where an adapter is."""
        entry = self._entries.get(key)
        if entry is None:
            return State.ABSENT
        return State.LOADING if entry.loading else State.RESIDENT

    def n_users(self, key: K) -> int:
        """Tickets that hold it."""
        entry = self._entries.get(key)
        return 0 if entry is None else len(entry.tickets)

    def keys(self) -> KeysView[K]:
        """Everything that has a place, loading or resident."""
        return self._entries.keys()

    def check(self, wanted: Mapping[K, int]) -> None:
        """MixTooLargeError for a set (with its bytes each) that an empty pool could not hold."""
        self._check(wanted, self.n_slots, self.max_bytes, MixTooLargeError)

    def acquire(self, ticket: Hashable, wanted: Mapping[K, int], *, pin: bool = False) -> Grant:
        """Holds all of `wanted` (bytes of each) for `ticket`, or nothing of it.

        READY and LOADING hold them until `release`. Raises a load's error while it is remembered,
        and CapacityError where pins leave too little for it ever to fit.
        """
        assert ticket not in self._tickets, "a ticket is given once"
        missing = [key for key in wanted if key not in self._entries]
        for key in missing:
            self._raise_remembered(key)
        self._check_beside_pins(wanted)
        if not self._make_room(len(missing), sum(wanted[key] for key in missing), wanted):
            return Grant.BLOCKED
        now = self._clock()
        for key in missing:
            self._entries[key] = _Entry(wanted[key], started=now)
            self._nbytes += wanted[key]
            self.to_load.append(key)
        for key in wanted:
            self._entries[key].tickets.add(ticket)
            self._idle.pop(key, None)
        n_loading = sum(self._entries[key].loading for key in wanted)
        self._stats.n_misses += n_loading
        self._stats.n_hits += len(wanted) - n_loading
        self._tickets[ticket] = tuple(wanted)
        if pin:
            self._pins.add(ticket)
        return Grant.LOADING if n_loading else Grant.READY

    def ready(self, ticket: Hashable) -> bool:
        """Whether all that a granted ticket holds is in memory."""
        return all(not self._entries[key].loading for key in self._tickets[ticket])

    def release(self, ticket: Hashable) -> None:
        """The ticket holds nothing any more; does nothing for one that held nothing."""
        self._pins.discard(ticket)
        for key in self._tickets.pop(ticket, ()):
            entry = self._entries[key]
            entry.tickets.discard(ticket)
            if not entry.tickets and not entry.loading:
                self._to_idle(key, entry)

    def loaded(self, key: K, nbytes: int) -> None:
        """A load ended well with `nbytes` in memory.

        CapacityError where that is more than was reserved and there is no room; then call `failed`.
        """
        entry = self._entries[key]
        assert entry.loading, "loaded twice"
        more = nbytes - entry.nbytes
        if more > 0 and not self._make_room(0, more, (key,)):
            raise CapacityError(
                f"the adapter takes {nbytes} bytes, {entry.nbytes} were reserved for it",
                hint="raise max_adapter_bytes",
            )
        self._nbytes += more
        entry.nbytes = nbytes
        entry.loading = False
        self._stats.n_loads += 1
        self._stats.load_seconds += self._clock() - entry.started
        if not entry.tickets:  # whoever wanted it is gone
            self._to_idle(key, entry)

    def failed(self, key: K, error: LoragraphError) -> list[Hashable]:
        """A load ended with `error`, remembered for a short time; the tickets that wait for it.

        They still hold what else they hold: release them.
        """
        entry = self._entries.pop(key)
        assert entry.loading, "a load that had ended failed"
        self._nbytes -= entry.nbytes
        self._stats.n_failures += 1
        if len(self._failures) >= _MAX_FAILURES:
            self._failures.pop(next(iter(self._failures)))
        self._failures[key] = (self._clock() + self._retry_seconds, error)
        for ticket in entry.tickets:
            self._tickets[ticket] = tuple(one for one in self._tickets[ticket] if one != key)
        return list(entry.tickets)

    def error_of(self, key: K) -> LoragraphError:
        """The remembered error of a load that failed just now."""
        return self._failures[key][1]

    def retire(self, key: K) -> None:
        """Nobody will ask for it again: drops it as soon as no ticket holds it."""
        self._failures.pop(key, None)
        entry = self._entries.get(key)
        if entry is not None:
            entry.retired = True
            if not entry.tickets and not entry.loading:
                self._drop(key)

    def check_invariants(self) -> None:
        """Asserts what must hold at any time; for tests."""
        assert len(self._entries) <= self.n_slots
        assert self._nbytes == sum(entry.nbytes for entry in self._entries.values())
        assert self.max_bytes is None or self._nbytes <= self.max_bytes
        held = {key for keys in self._tickets.values() for key in keys}
        assert held <= self._entries.keys()
        for key, entry in self._entries.items():
            assert entry.tickets == {t for t, keys in self._tickets.items() if key in keys}
            assert (key in self._idle) == (not entry.tickets and not entry.loading)
            assert not (entry.retired and key in self._idle)

    def _make_room(self, n_slots: int, nbytes: int, keep: Mapping[K, int] | tuple[K, ...]) -> bool:
        """Drops unheld adapters, the longest unused first, until so much is free; or nothing."""
        droppable = [key for key in self._idle if key not in keep]
        slots = self.n_slots - len(self._entries) - n_slots
        free = 0 if self.max_bytes is None else self.max_bytes - self._nbytes - nbytes
        victims: list[K] = []
        while slots < 0 or free < 0:
            if len(victims) == len(droppable):
                return False
            victims.append(droppable[len(victims)])
            slots += 1
            free += self._entries[victims[-1]].nbytes if self.max_bytes is not None else 0
        for key in victims:
            self._drop(key)
            self._stats.n_evictions += 1
        return True

    def _drop(self, key: K) -> None:
        entry = self._entries.pop(key)
        self._idle.pop(key, None)
        self._nbytes -= entry.nbytes
        self._evict(key)

    def _to_idle(self, key: K, entry: _Entry[K]) -> None:
        if entry.retired:
            self._drop(key)
        else:
            self._idle[key] = None

    def _raise_remembered(self, key: K) -> None:
        until, error = self._failures.get(key, (0.0, None))
        if error is None:
            return
        if self._clock() < until:
            raise error
        del self._failures[key]

    def _check_beside_pins(self, wanted: Mapping[K, int]) -> None:
        pinned = {key for pin in self._pins for key in self._tickets[pin]} - wanted.keys()
        nbytes = sum(self._entries[key].nbytes for key in pinned)
        limit = None if self.max_bytes is None else self.max_bytes - nbytes
        self._check(wanted, self.n_slots - len(pinned), limit, CapacityError)

    def _check(
        self,
        wanted: Mapping[K, int],
        n_slots: int,
        max_bytes: int | None,
        kind: type[CapacityError],
    ) -> None:
        if len(wanted) > n_slots:
            raise kind(
                f"expected at most {n_slots} adapters at once, got {len(wanted)}",
                hint="raise max_adapters, or unpin some",
            )
        if max_bytes is not None and sum(wanted.values()) > max_bytes:
            raise kind(
                f"expected adapters of at most {max_bytes} bytes together, got "
                f"{sum(wanted.values())}",
                hint="raise max_adapter_bytes, or unpin some",
            )
