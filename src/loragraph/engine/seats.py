"""Numbers for the running sequences, as llama-server numbers its slots. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from loragraph.engine.prefix_tree import Part
from loragraph.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SeatTokens:
    """The tokens of a sequence, as the prefix tree finds them."""

    tokens: list[int]
    parts: list[Part]


class Seats:
    """A sequence that runs has the lowest number that was free when it was admitted."""

    def __init__(self, n_seats: int) -> None:
        self._free = list(range(n_seats))
        self._of: dict[Sequence, int] = {}
        self._last: dict[int, SeatTokens] = {}

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
            self._last[seat] = _tokens_of(sequence)

    def keep(self, running: Collection[Sequence]) -> None:
        """All others leave: they were preempted, or ended before the other choices of their job."""
        for sequence in [one for one in self._of if one not in running]:
            self.leave(sequence)

    def of(self, sequence: Sequence | None) -> int | None:
        """Its number; None for one that does not run."""
        return None if sequence is None else self._of.get(sequence)

    def is_taken(self, seat: int) -> bool:
        """Whether a sequence runs there."""
        return seat in self._of.values()

    def tokens(self, seat: int) -> SeatTokens:
        """Those of the sequence that runs there, else of the last one that did, or was put."""
        for sequence, number in self._of.items():
            if number == seat:
                return _tokens_of(sequence)
        return self._last.get(seat) or SeatTokens([], [])

    def put(self, seat: int, tokens: SeatTokens) -> None:
        """What is to count as the last sequence's."""
        self._last[seat] = tokens


def _tokens_of(sequence: Sequence) -> SeatTokens:
    tokens = list(sequence.tokens)
    return SeatTokens(tokens, sequence.key_parts(0, len(tokens)))
