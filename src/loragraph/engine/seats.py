"""Numbers for the running sequences, as llama-server numbers its slots. Pure."""

from __future__ import annotations

import heapq

from loragraph.engine.sequence import Sequence


class Seats:
    """A sequence that runs has the lowest number that was free when it was admitted."""

    def __init__(self, n_seats: int) -> None:
        self._free = list(range(n_seats))
        self._of: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._of)

    def take(self, sequence: Sequence) -> None:
        """It was admitted."""
        sequence.seat = self._of[sequence] = heapq.heappop(self._free)

    def leave(self, sequence: Sequence) -> None:
        """It was preempted or has ended; does nothing for one that has no seat."""
        seat = self._of.pop(sequence, None)
        if seat is not None:
            heapq.heappush(self._free, seat)

    def of(self, sequence: Sequence | None) -> int | None:
        """Its number; None for one that does not run."""
        return None if sequence is None else self._of.get(sequence)
