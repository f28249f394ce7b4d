"""From the states of a prompt's tokens to its embedding: pooling and normalisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import InvalidRequestError

Pooling = Literal["mean", "last", "cls", "none"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls", "none")
MAX_NORM = 1 << 10
"""Largest p of a p-norm."""

_INT16_RANGE = 32760.0  # llama.cpp's (common/common.cpp, common_embd_normalize)


@dataclass(slots=True)
class PooledStates:
    """The states of a prompt as they come, a step's rows at a time, each n_embd wide."""

    pooling: Pooling
    normalize: int
    _sum: NDArray[np.float64] | None = None
    _n: int = 0
    _kept: list[NDArray[np.float32]] = field(default_factory=list)

    def first_needed(self, n_prompt: int) -> int:
        """The first token whose state is read."""
        return n_prompt - 1 if self.pooling == "last" else 0

    def add(self, states: NDArray[np.float32]) -> None:
        """The next rows (n, n_embd) f32, which are copied."""
        if not len(states):
            return
        if self.pooling == "mean":
            total = states.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
        elif self.pooling != "cls" or not self._kept:
            self._kept.append(states[:1].copy() if self.pooling == "cls" else states.copy())
        self._n += len(states)

    def result(self) -> NDArray[np.float32]:
        """(n_embd,) f32; with pooling "none" (n_tokens, n_embd) f32, as it is, without norm."""
        if self.pooling == "none":
            return np.concatenate(self._kept) if self._kept else np.empty((0, 0), np.float32)
        if self._sum is not None:
            return normalized((self._sum / self._n).astype(np.float32), self.normalize)
        if not self._kept:
            return np.empty(0, np.float32)
        return normalized(self._kept[-1][-1], self.normalize)


def normalized(values: NDArray[np.float32], p: int) -> NDArray[np.float32]:
    """`values` (n,) f32 over their p-norm; p -1: as they are, 0: scaled to the range of int16.

    Source: llama.cpp's `--embd-normalize`, where 1 is the taxicab norm and 2 the Euclidean one.
    """
    if p < 0:
        return values
    wide = np.abs(values.astype(np.float64))
    peak = float(wide.max(initial=0.0))
    if peak == 0.0:
        return values
    # over the peak, so that no power overflows
    size = peak / _INT16_RANGE if p == 0 else peak * float(((wide / peak) ** p).sum()) ** (1 / p)
    return (values / size).astype(np.float32)


def check_pooling(pooling: object, normalize: object) -> None:
    """InvalidRequestError for what is none."""
    if pooling not in POOLINGS:
        raise InvalidRequestError(
            f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r:.40}", param="pooling"
        )
    good = isinstance(normalize, int) and not isinstance(normalize, bool)
    if not (good and -1 <= normalize <= MAX_NORM):  # type: ignore[operator]
        raise InvalidRequestError(
            f"normalize: expected an integer from -1 to {MAX_NORM}, got {normalize!r:.40}",
            param="normalize",
        )
