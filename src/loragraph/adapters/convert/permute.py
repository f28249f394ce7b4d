"""Row order of q and k: transformers rotates (i, i + n_rot / 2), some GGUF families (2i, 2i + 1).

Those families' files hold the rows of attn_q and attn_k reordered head by head, so whatever is
indexed by such a row (lora_b, a magnitude, a bias) is reordered likewise; lora_a is not.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.convert.facts import BaseFacts
from loragraph.errors import AdapterMismatchError

REORDERED = frozenset({"llama", "granite", "granitemoe"})
"""Architectures whose GGUF files hold q and k rows in pairs."""

_Q_OR_K = re.compile(r"^blk\.(\d+)\.attn_([qk])$")


def row_heads(facts: BaseFacts, part: str) -> int:
    """Heads whose rows are reordered in `part` (as "blk.3.attn_q"), 0 where none are."""
    match = _Q_OR_K.match(part)
    if match is None or facts.info.arch not in REORDERED:
        return 0
    heads = facts.n_head if match[2] == "q" else facts.n_head_kv
    return heads[int(match[1])]


def reordered(values: NDArray[np.float32], n_head: int) -> NDArray[np.float32]:
    """Rows from transformers' order (halves of a head) to GGUF's (pairs); (n_rows, …) f32."""
    n_rows = values.shape[0]
    if n_head == 0:
        return values
    if n_rows % (2 * n_head):
        raise AdapterMismatchError(
            f"expected rows of {n_head} heads of an even width, got {n_rows} rows"
        )
    halves = values.reshape(n_head, 2, n_rows // n_head // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
