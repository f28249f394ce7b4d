"""aLoRA: from which token on an adapter is active, and the segments that come of it. Pure.

Semantics: an activated adapter is off before the last occurrence of its invocation tokens in the
prompt and on from that occurrence's first token on, as it was trained; a plain one is always on.
"""

from __future__ import annotations

from collections.abc import Sequence

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.sequence import Segment


def last_occurrence(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where the last occurrence of `wanted` (not empty) begins; None where there is none.

    Every start is tried, so occurrences that overlap each other, or themselves, are found.
    """
    wanted = list(wanted)
    n = len(wanted)
    for start in range(len(tokens) - n, -1, -1):
        if tokens[start] == wanted[0] and list(tokens[start : start + n]) == wanted:
            return start
    return None


def active_from(adapter: Adapter, tokens: Sequence[int]) -> int | None:
    """The first token that carries the adapter; None for one whose invocation does not occur."""
    invocation = adapter.invocation_tokens
    return last_occurrence(tokens, invocation) if invocation else 0


def segments_of(scales: Sequence[tuple[Adapter, float, int | None]]) -> tuple[Segment, ...]:
    """Segments from (adapter, scale, first token that carries it); equal neighbours are one."""
    starts = sorted({0} | {start for _, _, start in scales if start is not None})
    segments: list[Segment] = []
    for first in starts:
        active: dict[Adapter, float] = {}
        for adapter, scale, start in scales:
            if start is not None and start <= first:  # one adapter may have several names
                active[adapter] = active.get(adapter, 0.0) + scale
        mix = Mix(active) if active else EMPTY_MIX
        if not segments or segments[-1].mix != mix:
            segments.append(Segment(first, mix))
    return tuple(segments)
