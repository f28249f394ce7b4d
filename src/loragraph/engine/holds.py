"""Adapters held for no request: loaded ahead, or pinned."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from loragraph.engine.pool import Grant
from loragraph.engine.registry import Generation
from loragraph.engine.residency import Residency
from loragraph.errors import CapacityError, LoragraphError


@dataclass(slots=True, eq=False)
class Hold:
    """A load for no request. `pin`: it stays until `unpin` or `drop`; `outcome`: error or None."""

    generation: Generation
    pin: bool = False
    outcome: Future[LoragraphError | None] = field(default_factory=Future)

    def done(self, error: LoragraphError | None) -> None:
        """The load ended."""
        self.outcome.set_result(error)


class Holds:
    """The holds that are loading, and the pins. On the engine's thread."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._loading: dict[Hold, None] = {}
        self._pins: dict[Hold, None] = {}

    def hold(self, hold: Hold) -> None:
        """Loads an adapter, and pins it where asked; what is wrong is the hold's outcome."""
        try:
            grant = self._residency.acquire(hold, [hold.generation], pin=hold.pin)
        except LoragraphError as error:
            hold.done(error)
            return
        if grant is Grant.BLOCKED:
            hold.done(CapacityError("no room: every resident adapter is in use or pinned"))
        elif grant is Grant.READY:
            self._ready(hold)
        else:
            self._loading[hold] = None

    @property
    def pinned(self) -> frozenset[Generation]:
        """What is pinned now."""
        return frozenset(hold.generation for hold in self._pins)

    def unpin(self, generation: Generation) -> None:
        """Takes the pins of a generation back; it may be dropped once nobody uses it."""
        self.drop([one for one in self._pins if one.generation is generation])

    def drop(self, holds: Iterable[Hold]) -> None:
        """Takes pins back."""
        for hold in holds:
            self._pins.pop(hold, None)
            self._residency.pool.release(hold)

    def on_load(self) -> None:
        """A load ended: who waited for it has what he wanted."""
        for hold in [one for one in self._loading if self._residency.pool.ready(one)]:
            del self._loading[hold]
            self._ready(hold)

    def fail(self, hold: Hold, error: LoragraphError) -> None:
        """Its load failed."""
        self._loading.pop(hold, None)
        self._residency.pool.release(hold)
        hold.done(error)

    def close(self, error: LoragraphError) -> None:
        """Ends all that wait."""
        for hold in list(self._loading):
            self.fail(hold, error)

    def _ready(self, hold: Hold) -> None:
        if hold.pin:
            self._pins[hold] = None
        else:
            self._residency.pool.release(hold)
        hold.done(None)
