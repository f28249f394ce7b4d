"""One token stream and its state, as the scheduler sees it. Pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from loragraph.adapters.mix import Mix
from loragraph.engine.blocks import Cursor
from loragraph.engine.prefix_tree import EdgeKey, Node, Part

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
    last segment's mix. With `max_tokens` 0 the prompt is computed and nothing is generated.
    """

    sequence_id: int
    tokens: list[int]
    n_prompt: int
    segments: tuple[Segment, ...]
    max_tokens: int  # generated tokens at most
    salt: str = ""
    logits_from: int | None = None  # results of all tokens from here on are wanted
    gives_states: bool = False  # states instead of logits, for embeddings
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    n_computed: int = 0  # tokens that have cells in the path
    n_hit: int = 0  # prompt tokens found in the tree at the first admission
    n_preempted: int = 0
    seat: int = -1  # its last one, see Seats
    rank: int = -1  # turn of its first admission: a lower one is older
    node: Node | None = None  # end of its path in the prefix tree
    cursor: Cursor = field(default_factory=Cursor)
    flow: Hashable = field(init=False)  # the set of adapters it needs: what fairness is about
    _keys: tuple[EdgeKey, ...] = field(init=False, repr=False)  # of each segment
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._starts = tuple(segment.start for segment in self.segments)
        assert self._starts[0] == 0, "the first segment begins at token 0"
        self._keys = tuple((self.salt, segment.mix.key) for segment in self.segments)
        digests = {digest for segment in self.segments for digest, _ in segment.mix.key}
        self.flow = tuple(sorted(digests))

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
        return len(self.tokens) - self.n_computed == 1

    @property
    def n_reusable(self) -> int:
        """Tokens that the tree may serve: the others are computed, since their logits count."""
        n = len(self.tokens) - 1
        return n if self.logits_from is None else min(n, self.logits_from)

    def n_outputs(self, start: int, end: int) -> int:
        """Of tokens [start, end), how many at the end have logits that count."""
        last = int(end == len(self.tokens) and self.max_tokens > 0)
        if self.logits_from is None:
            return last
        return max(last, end - max(start, self.logits_from))

    def key_at(self, index: int) -> EdgeKey:
        """The tree's edge key of token `index`."""
        return self._keys[bisect_right(self._starts, index) - 1]

    def mix_at(self, index: int) -> Mix:
        """The mix of token `index`."""
        return self.segments[bisect_right(self._starts, index) - 1].mix

    def mix_parts(self, start: int, end: int) -> list[tuple[Mix, int, int]]:
        """Tokens [start, end) as parts (mix, start, end) of one segment each."""
        return [(self.segments[i].mix, a, b) for i, a, b in self._cut(start, end)]

    def key_parts(self, start: int, end: int) -> list[Part]:
        """Tokens [start, end) as parts (edge key, start, end) of one segment each."""
        return [(self._keys[i], a, b) for i, a, b in self._cut(start, end)]

    def _cut(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(segment index, start, end) of the segments of tokens [start, end)."""
        if start >= self._starts[-1]:  # the last segment: every token that decodes
            return [(len(self._starts) - 1, start, end)]
        i = bisect_right(self._starts, start) - 1
        parts = []
        while start < end:
            stop = self._starts[i + 1] if i + 1 < len(self._starts) else end
            parts.append((i, start, min(stop, end)))
            start, i = min(stop, end), i + 1
        return parts
