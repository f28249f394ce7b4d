"""What the engine's loop works with: the contracts of its parts, and sums over logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.graph.batch import Batch

_ROWS_AT_ONCE = 32  # of logits, when log-probabilities are taken


class StepRunner(Protocol):
    """Computes steps: `Runner`, or a fake."""

    def run(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]:
        """Logits (n_outputs, n_vocab) f32."""

    def zero_cells(self, cells: NDArray[np.int64]) -> None:
        """Zeroes cells, (n,) i64."""


class TokenTexts(Protocol):
    """What the loop needs of a vocabulary."""

    @property
    def n_tokens(self) -> int:
        """Tokens."""

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Bytes of a token."""

    def is_eog(self, token: int) -> bool:
        """Whether it ends a generation."""


def best_tokens(logits: NDArray[np.float32], rows: Sequence[int]) -> dict[int, int]:
    """The largest logit's token of these rows of `logits` (n_outputs, n_tokens) f32, by row.

    Rows whose logits are not finite are left out.
    """
    if not rows:
        return {}
    own = logits if len(rows) == len(logits) else logits[np.array(rows)]
    tokens = np.argmax(own, axis=1)  # a NaN counts as the largest
    finite = np.isfinite(own[np.arange(len(rows)), tokens])
    return {row: int(token) for row, token, good in zip(rows, tokens, finite, strict=True) if good}


def logprobs_of(logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    """log softmax of `logits` (n, n_tokens) f32 at one token a row, (n,) f64.

    Source: log p = x_t - max - log(sum(exp(x - max))), in f64, a few rows at a time.
    """
    out = np.empty(len(tokens))
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        part = np.array(tokens[start : start + _ROWS_AT_ONCE])
        rows = logits[start : start + len(part)].astype(np.float64)
        peak = rows.max(axis=1)
        total = np.log(np.exp(rows - peak[:, None]).sum(axis=1)) + peak
        out[start : start + len(part)] = rows[np.arange(len(part)), part] - total
    return out
