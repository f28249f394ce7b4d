"""How far two sets of numbers, or two greedy texts, are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def nmse(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Normalised mean squared error: mean((actual - expected)^2) / mean(expected^2).

    Not finite anywhere in `actual` gives infinity, so that a bound always fails.
    """
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: {a.shape} and {e.shape}")
    if not np.isfinite(a).all():
        return float("inf")
    return float(np.mean((a - e) ** 2) / np.mean(e**2))


def max_abs(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Largest absolute difference."""
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: {a.shape} and {e.shape}")
    return float(np.abs(a - e).max()) if np.isfinite(a).all() else float("inf")


WORSE = 1.15
"""A quantised base's allowed distance to float64, in libllama's own."""


def as_near(actual: npt.ArrayLike, other: npt.ArrayLike, exact: npt.ArrayLike) -> bool:
    """Whether `actual` is as near to the float64 numbers `exact` as `other`, and not far from it.

    For bases that round their activations: sums in another order flip roundings, how many depends
    on the processor, and one flip in an early layer moves all that follows. It cannot do more than
    the roundings themselves do, which is the distance of `other` to `exact`.
    """
    distance = nmse(other, exact)
    return nmse(actual, exact) <= WORSE * distance and nmse(actual, other) <= distance


def top_two_gap(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Distance (n,) between the two largest logits of each row (n, n_vocab)."""
    rows = np.asarray(logits, dtype=np.float64)
    best = np.partition(rows, -2, axis=-1)[..., -2:]
    out: npt.NDArray[np.float64] = best[..., 1] - best[..., 0]
    return out


@dataclass(frozen=True)
class GreedyAgreement:
    """Outcome of comparing two greedy texts."""

    n_compared: int  # positions before the first undecided one
    n_equal: int  # leading equal positions among them
    ended_early: bool  # an undecided position ended the comparison

    @property
    def agrees(self) -> bool:
        """Whether every compared position is equal."""
        return self.n_equal == self.n_compared


def greedy_agreement(
    actual: Sequence[int], expected: Sequence[int], expected_logits: npt.ArrayLike, bound: float
) -> GreedyAgreement:
    """Compare greedy ids up to the first position whose top-two gap is within the logit bound.

    `bound` is the largest difference allowed of one logit; two may differ in opposite directions,
    so a gap of up to twice the bound leaves the choice open. expected_logits (n, n_vocab).
    """
    if len(actual) != len(expected):
        raise ValueError(f"texts of {len(actual)} and {len(expected)} tokens")
    undecided = np.flatnonzero(top_two_gap(expected_logits) <= 2 * bound)
    n_compared = min([len(expected), *undecided[:1].tolist()])
    differing = [i for i in range(n_compared) if actual[i] != expected[i]]
    return GreedyAgreement(
        n_compared=n_compared,
        n_equal=differing[0] if differing else n_compared,
        ended_early=n_compared < len(expected),
    )
