"""The naive twin of the native attention over cells, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def attend(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    visible: Sequence[Sequence[int]],
    scale: float,
    softcap: float = 0.0,
    sinks: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Attention of every row over the cells that it sees: (n_rows, n_head * hd_v).

    Semantics: out = softmax(cap(scale * K q)) V over visible[row], cap(s) = c tanh(s / c)
    With sinks (n_head,) each head has a score more, of a V that is zero.
    q (n_rows, n_head, hd_k) · k (n_cells, n_head_kv, hd_k) · v (n_cells, n_head_kv, hd_v).
    """
    n_rows, n_head, _ = q.shape
    group = n_head // k.shape[1]
    out = np.zeros((n_rows, n_head, v.shape[2]))
    for row in range(n_rows):
        cells = list(visible[row])
        for head in range(n_head):
            scores = scale * (k[cells, head // group] @ q[row, head])
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights = weights / weights.sum()
            out[row, head] = weights[: len(cells)] @ v[cells, head // group]
    return out.reshape(n_rows, -1)
