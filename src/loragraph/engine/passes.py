"""The passes over the rows of a step, run beside one another.

In: what each sampler asks of its row. Out: what the samplers choose. Knows no ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from loragraph.errors import LoragraphError
from loragraph.kernels.sampling import Passes, RowCall

RunCalls = Callable[[Sequence[RowCall]], None]
"""Runs calls of different rows, in any order; returns when all are done."""

_T = TypeVar("_T")


def together(passes: Sequence[Passes[_T]], run: RunCalls) -> list[_T | LoragraphError]:
    """What each gives or raises; a round runs the next call of all that have not ended."""
    found: dict[int, _T | LoragraphError] = {}
    left = list(range(len(passes)))
    try:
        while left:
            calls: dict[int, RowCall] = {}
            for i in left:
                try:
                    calls[i] = next(passes[i])
                except StopIteration as end:
                    found[i] = end.value
                except LoragraphError as error:
                    found[i] = error
            run(list(calls.values()))
            left = list(calls)
    finally:
        for one in passes:
            one.close()  # puts back what it has changed, where another has raised
    return [found[i] for i in range(len(passes))]
