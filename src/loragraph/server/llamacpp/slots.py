"""Numbers for the generations of now, as llama-server's slots have them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from loragraph.server.runs import Run
from loragraph.server.state import ServerState

_KEY = "slots"


class Slots:
    """Each run has the lowest number that is free at its start. Belongs to the event loop.

    Those that wait for a seat have a number too, so it may be above that of the seats.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
        self._busy: dict[int, Run] = {}

    @classmethod
    def of(cls, state: ServerState) -> Slots:
        """Those of a server; see `install`."""
        slots = state.extra[_KEY]
        assert isinstance(slots, cls)
        return slots

    def on_start(self, run: Run) -> None:
        """Gives it a number."""
        number = next(i for i in range(len(self._busy) + 1) if i not in self._busy)
        self._numbers[run] = number
        self._busy[number] = run

    def on_end(self, run: Run) -> None:
        """Its number is free for others."""
        del self._busy[self._numbers[run]]

    def number(self, run: Run) -> int:
        """The number that a run has or had; -1 before its start."""
        return self._numbers.get(run, -1)

    def runs(self) -> dict[int, Run]:
        """The runs of now by their numbers."""
        return dict(self._busy)


def install(state: ServerState) -> None:
    """Has a server give numbers to its runs."""
    slots = Slots()
    state.extra[_KEY] = slots
    state.hooks.append(slots)
