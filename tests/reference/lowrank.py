"""The naive twin of the native low-rank kernels, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Pair:
    """One adapter's factors for one target, as plain numbers."""

    a: NDArray[np.float64]  # (rank, n_in)
    b: NDArray[np.float64]  # (n_out, rank)
    scale: float  # alpha / rank


def add_low_rank(
    y: NDArray[np.float64],
    x: NDArray[np.float64],
    pairs: Sequence[Pair | None],
    entries: Sequence[tuple[int, int, float]],
) -> NDArray[np.float64]:
    """y plus the low-rank part of every (slot, row, user scale) in `entries`.

    Semantics: y[row] += scale * pair.scale * b @ (a @ x[row]),  pair = pairs[slot]
    y (n_rows, n_out) · x (n_rows, n_in). None: the adapter does not touch the target.
    """
    out = y.copy()
    for slot, row, scale in entries:
        pair = pairs[slot]
        if pair is not None:
            out[row] += scale * pair.scale * (pair.b @ (pair.a @ x[row]))
    return out
