"""Truncated singular value decompositions: of a product of thin factors, and of a matrix.

Energy is the sum of squared singular values; what k of them capture of a matrix's energy is 1 minus
the squared relative error (Frobenius) of the best approximation of rank k (Eckart-Young).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_EXACT_SIDE = 768  # a smaller matrix is decomposed exactly
_MARGIN = 16  # directions beyond the rank asked for
_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Svd:
    """u @ diag(s) @ v approximates a matrix; u (n_out, k), s (k,) descending, v (k, n_in)."""

    u: Doubles
    s: Doubles
    v: Doubles
    total: float  # energy of the whole matrix

    def captured(self, rank: int) -> float:
        """Share of the energy that the first `rank` directions hold, in [0, 1]."""
        if self.total <= 0:
            return 1.0
        return min(1.0, float(np.sum(self.s[:rank] ** 2)) / self.total)

    def rank_for(self, energy: float) -> int:
        """The smallest rank that captures the share `energy`, at least 1."""
        if self.total <= 0:
            return 1
        shares = np.cumsum(self.s**2) / self.total
        # The sum of all may round below 1.
        enough = np.flatnonzero(shares >= min(energy, shares[-1]))
        return int(enough[0]) + 1

    def factors(self, rank: int) -> tuple[Floats, Floats]:
        """left (n_out, rank) and right (rank, n_in) f32 whose product is the approximation.

        Each gets the root of the singular values, so that neither half has extreme values.
        """
        root = np.sqrt(self.s[:rank])
        left, right = self.u[:, :rank] * root, root[:, None] * self.v[:rank]
        missing = rank - len(root)
        left = np.pad(left, ((0, 0), (0, max(0, missing))))
        right = np.pad(right, ((0, max(0, missing)), (0, 0)))
        return left.astype(np.float32), right.astype(np.float32)


def svd_of_product(left: Floats, right: Floats) -> Svd:
    """The exact decomposition of left @ right, (n_out, r) and (r, n_in), without multiplying out.

    QR of both, then an r x r decomposition, in f64.
    """
    q_left, r_left = np.linalg.qr(left.astype(np.float64))
    q_right, r_right = np.linalg.qr(right.T.astype(np.float64))
    u, s, v = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return Svd(q_left @ u, s, v @ q_right.T, float(np.sum(s**2)))


def truncated_svd(matrix: Floats, rank: int, *, exact: bool = False, seed: int = 0) -> Svd:
    """The first `rank` directions of a matrix (n_out, n_in), and its whole energy.

    A large matrix is decomposed by subspace iteration from a random start (Halko, Martinsson,
    Tropp, 2011, algorithm 4.4), unless `exact` or nearly all directions are wanted. What is said to
    be captured is what these directions do capture.
    """
    side = min(matrix.shape)
    total = float(np.sum(np.square(matrix, dtype=np.float64)))
    width = min(side, rank + _MARGIN)
    if exact or side <= _EXACT_SIDE or 2 * width >= side:
        u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        return Svd(u[:, :rank], s[:rank], v[:rank], total)
    start = np.random.default_rng(seed).standard_normal((matrix.shape[1], width), np.float32)
    basis = np.linalg.qr(matrix @ start)[0]
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(matrix.T @ basis)[0]
        basis = np.linalg.qr(matrix @ basis)[0]
    u, s, v = np.linalg.svd((basis.T @ matrix).astype(np.float64), full_matrices=False)
    return Svd((basis.astype(np.float64) @ u)[:, :rank], s[:rank], v[:rank], total)
