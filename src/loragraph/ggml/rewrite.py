"""Rows of any ggml type into any other, a low-rank change added in between, in one native pass.

The number formats are ggml's own functions, so the bytes are what `quants` makes row by row.
"""

from __future__ import annotations

import numpy as np

from loragraph.errors import UnsupportedError
from loragraph.ggml.handles import F32
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import (
    can_read,
    can_write,
    largest,
    needs_importance,
    row_bytes,
    type_name,
)
from loragraph.kernels.rewrite import RowChange, RowFormat, RowRewriter


def row_rewriter(
    lib: Library, source: int, stored: int, n_in: int, change: RowChange | None = None
) -> RowRewriter:
    """Turns rows of `n_in` values from type `source` into type `stored`.

    All columns weigh the same where ggml wants to be told what they weigh. UnsupportedError for a
    type that cannot be read or written.
    """
    if not can_read(lib, source) or not can_write(lib, stored):
        raise UnsupportedError(
            f"rows of {type_name(lib, source)} cannot be turned into {type_name(lib, stored)}",
            what=f"type {type_name(lib, stored if can_read(lib, source) else source)}",
        )
    to_float = 0 if source == F32 else lib.address(lib.c.ggml_get_type_traits(source).to_float)
    form = RowFormat(
        to_float=to_float,
        quantize=lib.address(lib.ffi.addressof(lib.c, "ggml_quantize_chunk")),
        type=stored,
        n_in=n_in,
        source_row=row_bytes(lib, source, n_in),
        stored_row=row_bytes(lib, stored, n_in),
        bound=largest(stored),
        weights=np.ones(n_in, np.float32) if needs_importance(lib, stored) else None,
    )
    return RowRewriter(form, change)
