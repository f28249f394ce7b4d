"""The pool's decisions carried out: loads in a worker, tensors into slots, memory given back.

All but the loading itself happens on the engine's thread, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Protocol

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.engine.pool import Grant, Pool, State
from loragraph.engine.registry import Generation, Registry, header_of, resident_bytes
from loragraph.errors import (
    AdapterChangedError,
    LifecycleError,
    LoragraphError,
    ModelNotFoundError,
)

_USER = "the engine"  # what an adapter says of who uses it


class Slots(Protocol):
    """Where resident adapters are read from: the routed lowering, or a fake."""

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """Makes exactly these adapters resident; all or nothing."""

    def check(self, mix: Mix) -> None:
        """Raises for a mix that it cannot compute."""


def _close(adapter: Adapter) -> None:
    """Unless somebody else has attached it, with whom it stays until the model goes."""
    with suppress(LifecycleError):
        adapter.close()


class Residency:
    """Generations in memory. `start_load` is asked to load one and to report through `on_load`."""

    def __init__(
        self,
        registry: Registry,
        slots: Slots,
        start_load: Callable[[Generation], None],
        n_slots: int,
        max_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.pool: Pool[Generation] = Pool(n_slots, max_bytes, clock, self._evicted)
        self.adapters: dict[Generation, Adapter] = {}
        self._registry = registry
        self._slots = slots
        self._start_load = start_load
        self._clock = clock
        self._dropped: list[tuple[Generation, Adapter]] = []
        self.is_awaited: Callable[[Generation], bool] = lambda generation: False
        """Whether a request waits that will ask for a generation; the engine's core knows."""

    def on_load(self, generation: Generation, outcome: Adapter | LoragraphError) -> list[Hashable]:
        """A load ended: places the adapter. Returns the tickets that failed with it."""
        if isinstance(outcome, LoragraphError):
            generation.counts.n_failures += 1
            return self.pool.failed(generation, outcome)
        try:
            generation.check_digest(outcome.digest)
            self._place(generation, outcome)
        except LoragraphError as error:
            if isinstance(error, AdapterChangedError):
                self._registry.renew(generation, header_of(outcome))
            if outcome is not generation.adapter:  # else the caller's
                outcome.close()
            generation.counts.n_failures += 1
            return self.pool.failed(generation, error)
        generation.header = header_of(outcome)  # the file may be another than at registration
        generation.report = outcome.report
        generation.counts.n_loads += 1
        generation.counts.load_s += self._clock() - generation.load_started
        return []

    def sync(self) -> None:
        """Lets what the pool dropped out of its slots, and frees it. Before a step."""
        if not self._dropped:
            return
        self._slots.hold(self.adapters.values())
        dropped, self._dropped = self._dropped, []
        for generation, adapter in dropped:
            adapter.detach(_USER)
            if adapter is not generation.adapter or self._is_done(generation):
                _close(adapter)

    def retire(self, generation: Generation) -> None:
        """See Pool.retire. Again when a request that wanted it has left."""
        self.pool.retire(generation)
        adapter = generation.adapter
        absent = self.pool.state(generation) is State.ABSENT
        if adapter is not None and absent and self._is_done(generation):
            self.sync()
            _close(adapter)

    def acquire(
        self, ticket: Hashable, generations: Iterable[Generation], *, pin: bool = False
    ) -> Grant:
        """See Pool.acquire; starts the loads that come of it.

        Adapters that the caller gave in memory are placed at once.
        """
        wanted = {generation: generation.header.nbytes for generation in generations}
        for generation in wanted:
            if generation.owned and generation.adapter is not None and generation.adapter.closed:
                raise ModelNotFoundError(f"adapter {generation.name!r} was unloaded meanwhile")
        grant = self.pool.acquire(ticket, wanted, pin=pin)
        for generation in wanted:
            if generation.retired:  # its last users: it goes with them
                self.pool.retire(generation)
        failed: Generation | None = None
        while self.pool.to_load:
            generation = self.pool.to_load.popleft()
            generation.load_started = self._clock()
            if generation.adapter is None:
                self._start_load(generation)
            elif ticket in self.on_load(generation, generation.adapter):
                failed = generation
        if failed is not None:  # after the others were started: their places wait for that
            self.pool.release(ticket)
            raise self.pool.error_of(failed)
        if grant is Grant.LOADING and self.pool.ready(ticket):
            return Grant.READY
        return grant

    def close(self) -> None:
        """Empties the slots and frees every adapter that the engine loaded."""
        self._slots.hold(())
        for generation in list(self.adapters):
            self._evicted(generation)
        self.sync()
        for generation in self._registry.current().values():
            if generation.owned and generation.adapter is not None:
                _close(generation.adapter)

    def check(self, mix: Mix) -> None:
        """Raises for a mix that cannot be computed: too many adapters, or a scale too large."""
        self._slots.check(mix)
        for adapter, scale in mix:
            for target in adapter.pairs:
                adapter.effective_scale(target, scale)

    def has(self, generations: Iterable[Generation]) -> bool:
        """Whether all are in memory."""
        return all(self.pool.state(one) is State.RESIDENT for one in generations)

    def state(self, generation: Generation) -> State:
        """Where a generation is."""
        return self.pool.state(generation)

    def _is_done(self, generation: Generation) -> bool:
        """Whether nobody will ask for an adapter that goes with its generation."""
        return generation.owned and generation.retired and not self.is_awaited(generation)

    def _place(self, generation: Generation, adapter: Adapter) -> None:
        """All or nothing: attached, in a slot, and counted."""
        adapter.attach(_USER)
        try:
            self.sync()  # the slots of what was dropped are free
            self._slots.hold([*self.adapters.values(), adapter])
            self.pool.loaded(generation, resident_bytes(adapter))
        except LoragraphError:
            self._slots.hold(self.adapters.values())
            adapter.detach(_USER)
            raise
        self.adapters[generation] = adapter
        if self.pool.state(generation) is State.ABSENT:  # dropped at once: nobody wants it any more
            self._evicted(generation)

    def _evicted(self, generation: Generation) -> None:
        adapter = self.adapters.pop(generation, None)
        if adapter is not None:
            self._dropped.append((generation, adapter))
            if not generation.retired:
                generation.counts.n_evictions += 1
