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
    """A load for no request. `outcome`: its error, or None.

    `pin`: it stays until `unpin`, for as long as the name means the generation; `keep`: it stays
    until its owner drops it, whatever others do with the name. A generation that is retired has no
    name that leads to it: without `keep` it is not held, which is no error.
    """

    generation: Generation
    pin: bool = False
    keep: bool = False
    replaces: Generation | None = None  # whose pins give way where there is no room
    outcome: Future[LoragraphError | None] = field(default_factory=Future)

    def done(self, error: LoragraphError | None) -> None:
        """The load ended."""
        self.outcome.set_result(error)


class Holds:
    """The holds that are loading, and those that stay. On the engine's thread."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._loading: dict[Hold, None] = {}
        self._kept: dict[Hold, None] = {}
        self._gave_way: dict[Hold, Generation] = {}  # had pins, which come back if the hold fails

    def hold(self, hold: Hold) -> None:
        """Loads an adapter, and keeps it where asked; what is wrong is the hold's outcome."""
        error = self._try(hold)
        old = hold.replaces
        if isinstance(error, CapacityError) and old is not None and old in self.pinned:
            self.unpin(old)
            self._gave_way[hold] = old
            error = self._try(hold)
        if error is not None:
            self.fail(hold, error)

    @property
    def pinned(self) -> frozenset[Generation]:
        """What is pinned now."""
        return frozenset(hold.generation for hold in self._kept if hold.pin)

    def unpin(self, generation: Generation) -> None:
        """Takes the pins of a generation back; it may be dropped once nobody uses it."""
        self.drop([one for one in self._kept if one.pin and one.generation is generation])
        for hold in [one for one, old in self._gave_way.items() if old is generation]:
            del self._gave_way[hold]

    def drop(self, holds: Iterable[Hold]) -> None:
        """Takes holds back, those that are loading too."""
        for hold in holds:
            self._loading.pop(hold, None)
            self._kept.pop(hold, None)
            self._residency.pool.release(hold)

    def on_load(self) -> None:
        """A load ended: who waited for it has what he wanted."""
        for hold in [one for one in self._loading if self._residency.pool.ready(one)]:
            del self._loading[hold]
            self._ready(hold)

    def fail(self, hold: Hold, error: LoragraphError) -> None:
        """It cannot be held. The pins that gave way for it come back where there is room."""
        self.drop([hold])
        old = self._gave_way.pop(hold, None)
        if old is not None:
            self.hold(Hold(old, pin=True))
        hold.done(error)

    def close(self, error: LoragraphError) -> None:
        """Ends all that wait."""
        self._gave_way.clear()
        for hold in list(self._loading):
            self.fail(hold, error)

    def _try(self, hold: Hold) -> LoragraphError | None:
        """Why it cannot be held; None where it is held, or on its way."""
        if hold.generation.retired and not hold.keep:
            hold.done(None)
            return None
        try:
            # A hold that ends by itself is no pin to those who wait for room.
            grant = self._residency.acquire(hold, [hold.generation], pin=hold.pin)
        except LoragraphError as error:
            return error
        if grant is Grant.BLOCKED:
            return CapacityError("no room: every resident adapter is in use or pinned")
        if grant is Grant.READY:
            self._ready(hold)
        else:
            self._loading[hold] = None
        return None

    def _ready(self, hold: Hold) -> None:
        self._gave_way.pop(hold, None)
        if hold.keep or (hold.pin and not hold.generation.retired):
            self._kept[hold] = None
        else:
            self._residency.pool.release(hold)
        hold.done(None)
