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


def add_low_rank_experts(
    y: NDArray[np.float64],
    x: NDArray[np.float64],
    ids: NDArray[np.int32],
    pairs: Sequence[Sequence[Pair] | None],
    entries: Sequence[tuple[int, int, float]],
) -> NDArray[np.float64]:
    """y plus the low-rank part of every (slot, token, user scale), by the token's experts.

    Semantics: y[token * n_used + u] += the dense formula with pairs[slot][ids[token, u]]
    y (n_tokens * n_used, n_out) · x (n_tokens, 1 or n_used, n_in) · ids (n_tokens, n_used)
    """
    n_used = ids.shape[1]
    out = y.copy()
    for slot, token, scale in entries:
        experts = pairs[slot]
        for u in range(n_used if experts is not None else 0):
            assert experts is not None
            pair = experts[ids[token, u]]
            one = x[token, u % x.shape[1]]
            out[token * n_used + u] += scale * pair.scale * (pair.b @ (pair.a @ one))
    return out
