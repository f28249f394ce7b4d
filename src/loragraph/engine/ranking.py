"""The largest logits, without a sort or a partition of all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUPS = 2048  # their maxima fit the first cache
_GROUPS_PER_WANTED = 8


def ranked(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ids of the `n` largest of `logits` (n_vocab,) f32, best first, the lower id among equals."""
    ids = _candidates(logits, n) if n < len(logits) else np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][:n]


def _candidates(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ascending ids of at least the `n` largest, with all that equal the last of them."""
    size = len(logits)
    n_groups = max(_GROUPS, _GROUPS_PER_WANTED * n)
    if 2 * n_groups > size:
        return np.flatnonzero(logits >= np.partition(logits, size - n)[size - n])
    # Group g holds every n_groups-th value from g on. The n-th largest of the groups' maxima is no
    # larger than the n-th largest value, and only groups whose maximum reaches it can hold one.
    whole = size - size % n_groups
    table = logits[:whole].reshape(-1, n_groups)
    maxima = table.max(0)
    least = np.partition(maxima, n_groups - n)[n_groups - n]
    groups = np.flatnonzero(maxima >= least)
    row, column = np.nonzero(table[:, groups] >= least)
    rest = whole + np.flatnonzero(logits[whole:] >= least)
    return np.concatenate([row * n_groups + groups[column], rest])
