"""Naive truncation of a change to a rank: multiplied out, decomposed in full, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def truncated(matrix: npt.ArrayLike, rank: int) -> tuple[Doubles, float]:
    """The best approximation of `rank` of a matrix (n_out, n_in), and its relative error."""
    exact = np.asarray(matrix, np.float64)
    u, s, v = np.linalg.svd(exact, full_matrices=False)
    best: Doubles = (u[:, :rank] * s[:rank]) @ v[:rank]
    return best, float(np.linalg.norm(exact - best) / np.linalg.norm(exact))
