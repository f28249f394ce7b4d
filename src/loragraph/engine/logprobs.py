"""Log-probabilities of tokens under the model's own distribution: log softmax of the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.ranking import ranked
from loragraph.kernels.sampling import best_of_rows

_ROWS_AT_ONCE = 32  # of logits: what they are copied to stays small


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability (natural logarithm), and the most likely ones in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), best first


def logprobs_of(logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    """log softmax of `logits` (n, n_tokens) f32 at one token a row, (n,) f64.

    Source: log p = x_t - max - log(sum(exp(x - max))), summed in f64, a few rows at a time.
    """
    totals = _totals(logits[: len(tokens)])
    return logits[np.arange(len(tokens)), np.array(tokens, np.intp)] - totals


def token_logprobs(
    logits: NDArray[np.float32], tokens: Sequence[int], n_top: Sequence[int]
) -> list[TokenLogprob]:
    """One token and its `n_top` most likely rivals a row of `logits` (n, n_tokens) f32."""
    totals = _totals(logits[: len(tokens)])
    found = []
    for row, total, token, k in zip(logits, totals, tokens, n_top, strict=False):
        top: tuple[tuple[int, float], ...] = ()
        if k:
            best = ranked(row, k)
            top = tuple(zip(best.tolist(), (row[best] - total).tolist(), strict=True))
        found.append(TokenLogprob(token, float(row[token] - total), top))
    return found


def best_tokens(logits: NDArray[np.float32], rows: Sequence[int]) -> dict[int, int]:
    """The largest logit's token of these rows of `logits` (n_outputs, n_tokens) f32, by row.

    Rows whose logits are not finite are left out.
    """
    if not rows:
        return {}
    tokens, finite = best_of_rows(logits, rows)
    found = zip(rows, tokens, finite, strict=True)
    return {row: token for row, token, good in found if good}


def _totals(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log(sum(exp(x))) of each row of `logits` (n, n_tokens) f32, (n,) f64."""
    totals = np.empty(len(logits))
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        peak = rows.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # infinities: whoever reads them finds NaN
            shifted = rows - peak
        total = np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64)
        totals[start : start + len(rows)] = np.log(total) + peak[:, 0]
    return totals
