"""The naive twin of the rewriting of rows: f64, one product, one sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.rewrite import RowChange


def changed(values: NDArray[np.float32], change: RowChange | None) -> NDArray[np.float64]:
    """(1 + gain) W + left @ right of all rows, (n_out, n_in) f64."""
    wide = values.astype(np.float64)
    if change is None:
        return wide
    if change.gain is not None:
        wide = wide * (1 + change.gain.astype(np.float64))
    product: NDArray[np.float64] = change.left.astype(np.float64) @ change.right.astype(np.float64)
    return wide + product
