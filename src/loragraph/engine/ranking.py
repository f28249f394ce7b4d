"""The largest logits, without a sort or a partition of all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.sampling import LogitRow, Passes, alone

_MAX_HEAP = 2048


def ranked(logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Ids of the `n` largest of `logits` (n_vocab,) f32, best first, the lower id among equals."""
    if not len(logits):
        return np.empty(0, np.int64)
    row = LogitRow(len(logits))
    alone(row.read(np.ascontiguousarray(logits)))
    return alone(best_of(row, logits, n))


def best_of(row: LogitRow, logits: NDArray[np.float32], n: int) -> Passes[NDArray[np.int64]]:
    """`ranked` of logits that `row` has read."""
    if n <= _MAX_HEAP:
        return (yield from row.top(n))
    size = len(logits)
    if n < size:
        ids = np.flatnonzero(logits >= np.partition(logits, size - n)[size - n])
    else:
        ids = np.arange(size)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][:n]
