"""Rows of a weight into another number format, a low-rank change added in between (rewrite.h).

The formats are functions of ggml, given by their addresses. A call runs without Python's lock, so
threads can share out the rows of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.library import aligned_empty, ffi, lib, pointer

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows are read and stored."""

    to_float: int  # address of `to_float` of ggml's type traits; 0: the rows are F32
    quantize: int  # address of ggml_quantize_chunk
    type: int  # ggml's number of the type to store as
    n_in: int  # values of a row
    source_row: int  # bytes of a row that is read
    stored_row: int  # bytes of a row that is stored
    bound: float  # the largest magnitude that may be stored
    weights: Floats | None = None  # (n_in,) of the columns; None: the type's own rule


@dataclass(frozen=True, slots=True)
class RowChange:
    """(1 + gain) W + left @ right, for all rows of one matrix; contiguous."""

    left: Floats  # (n_out, rank)
    right: Floats  # (rank, n_in)
    gain: Floats | None = None  # (n_out, 1) of the rows, or (1, n_in) of the columns

    def __post_init__(self) -> None:
        arrays = (
            (self.left, self.right) if self.gain is None else (self.left, self.right, self.gain)
        )
        if any(part.dtype != np.float32 or not part.flags.c_contiguous for part in arrays):
            raise ValueError("expected contiguous F32 factors and gains")
        shape = self.left.shape[0], self.right.shape[1]
        if self.left.shape[1] != self.right.shape[0] or min(shape) < 1:
            raise ValueError(
                f"expected factors of one rank, got {self.left.shape} and {self.right.shape}"
            )
        if self.gain is not None and self.gain.shape not in ((shape[0], 1), (1, shape[1])):
            raise ValueError(f"expected a gain a row or a column, got {self.gain.shape}")


class RowRewriter:
    """Turns rows of one format, with a change of one matrix or none; for any number of threads."""

    def __init__(self, format: RowFormat, change: RowChange | None) -> None:
        if change is not None and change.right.shape[1] != format.n_in:
            raise ValueError(f"expected a change of rows of {format.n_in} values")
        self.format, self.change = format, change
        self._format = ffi.new(
            "rewrite_format *",
            {
                "to_float": ffi.cast("loragraph_to_float", format.to_float),
                "quantize": ffi.cast("loragraph_quantize", format.quantize),
                "type": format.type,
                "n_in": format.n_in,
                "source_row": format.source_row,
                "stored_row": format.stored_row,
                "weights": _floats(format.weights),
                "bound": format.bound,
            },
        )

    @property
    def n_scratch(self) -> int:
        """Values of the rows that are turned at once."""
        return int(lib.loragraph_rewrite_rows(self.format.n_in)) * self.format.n_in

    def scratch(self) -> Floats:
        """Room for the rows that are turned at once, of a thread."""
        return aligned_empty(4 * self.n_scratch).view(np.float32)

    def run(self, first: int, source: Bytes, stored: Bytes, scratch: Floats) -> Floats | None:
        """Turns whole rows in `source` into `stored`, for rows `first` and following of the change.

        None, or the rows of which one is NaN or beyond the bound, (n, n_in) f32 in `scratch`: then
        the work ended there.
        """
        form = self.format
        n_rows, rest = divmod(len(source), form.source_row)
        block = int(lib.loragraph_rewrite_rows(form.n_in))
        if rest or len(stored) != n_rows * form.stored_row or scratch.size < block * form.n_in:
            raise ValueError(f"expected whole rows and room for {block} of {form.n_in} values")
        done = lib.loragraph_rewrite(
            self._format,
            self._part(first, n_rows),
            n_rows,
            pointer(source, "char *"),
            pointer(scratch, "float *"),
            pointer(stored, "char *"),
        )
        if done == n_rows:
            return None
        n = min(block, n_rows - int(done))
        return scratch[: n * form.n_in].reshape(n, form.n_in)

    def _part(self, first: int, n_rows: int) -> Any:
        """The change from row `first` on."""
        change = self.change
        if change is None:
            return ffi.new("rewrite_change *")
        if not 0 <= first <= len(change.left) - n_rows:
            raise ValueError(f"expected rows of {len(change.left)}, got {n_rows} from {first} on")
        gain = change.gain
        rows = gain is not None and gain.shape[1] == 1 and len(gain) == len(change.left)
        return ffi.new(
            "rewrite_change *",
            {
                "left": _floats(change.left[first:]),
                "right": _floats(change.right),
                "rank": change.left.shape[1],
                "row_gain": _floats(gain[first:] if gain is not None and rows else None),
                "column_gain": _floats(None if rows else gain),
            },
        )


def _floats(array: Floats | None) -> Any:
    return ffi.NULL if array is None else pointer(array, "float *")
