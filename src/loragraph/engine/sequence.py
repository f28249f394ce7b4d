"""One token stream and its state, as the scheduler sees it. Pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from loragraph.adapters.mix import Mix
from loragraph.engine.blocks import Cursor
from loragraph.engine.prefix_tree import EdgeKey, Node

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Segment:
    """From token `start` on (up to the next segment), tokens carry `mix`."""

    start: int
    mix: Mix


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens (prompt, then generated), the mix of each, and how many have cells.

    Every token carries its adapters: segments begin at 0 and ascend; what is generated carries the
    last segment's mix.
    """

    sequence_id: int
    tokens: list[int]
    n_prompt: int
    segments: tuple[Segment, ...]
    max_tokens: int  # generated tokens at most
    salt: str = ""
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    n_computed: int = 0  # tokens that have cells in the path
    n_hit: int = 0  # of those, found in the tree (first admission)
    n_preempted: int = 0
    node: Node | None = None  # end of its path in the prefix tree
    cursor: Cursor = field(default_factory=Cursor)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Known tokens that have no cells yet; 1 while it decodes."""
        return len(self.tokens) - self.n_computed

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.n_pending == 1

    @property
    def flow(self) -> tuple[tuple[str, float], ...]:
        """What fairness is about: the mix that it ends up with."""
        return self.segments[-1].mix.key

    def mix_at(self, index: int) -> Mix:
        """The mix of token `index`."""
        place = bisect_right(self.segments, index, key=lambda segment: segment.start)
        return self.segments[place - 1].mix

    def edge_keys(self, start: int, end: int) -> SequenceOf[EdgeKey]:
        """The tree's edge keys of tokens [start, end)."""
        keys: list[EdgeKey] = []
        for segment, segment_end in self.segment_ranges(start, end):
            key = (self.salt, segment.mix.key)
            keys.extend([key] * (segment_end - len(keys) - start))
        return keys

    def segment_ranges(self, start: int, end: int) -> list[tuple[Segment, int]]:
        """The segments of tokens [start, end), each with the end of its part."""
        ends = [segment.start for segment in self.segments[1:]] + [end]
        return [
            (segment, min(segment_end, end))
            for segment, segment_end in zip(self.segments, ends, strict=True)
            if segment_end > start and segment.start < end
        ]
