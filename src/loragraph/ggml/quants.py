"""Rows of any ggml type to f32 and back, through ggml's own functions; shapes checked before.

A call runs without Python's lock, so threads can share out the rows of a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import UnsupportedError
from loragraph.ggml.handles import BF16, F16, F32
from loragraph.ggml.lib import Library

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_N_TYPES = 43  # GGML_TYPE_COUNT: ggml looks numbers up in a table without a check
# The types that ggml_quantize_chunk has a case for; any other number would end the process.
_WRITABLE = frozenset(
    (F32, F16, 2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29, BF16, 34, 35, *range(39, 43))
)
_F16_MAX = 65504.0


def type_name(lib: Library, type_: int) -> str:
    """ggml's name of a type, as `q4_K`."""
    if not 0 <= type_ < _N_TYPES:
        return f"type {type_}"
    return lib.text(lib.c.ggml_type_name(type_)) or f"type {type_}"


def block_values(lib: Library, type_: int) -> int:
    """Values of a block: rows of the type are multiples of it; 0 for a number without a type."""
    return int(lib.c.ggml_blck_size(type_)) if 0 <= type_ < _N_TYPES else 0


def row_bytes(lib: Library, type_: int, n: int) -> int:
    """Bytes of a row of `n` values, a multiple of the type's block."""
    block = block_values(lib, type_)
    if block == 0 or n % block:
        raise UnsupportedError(
            f"rows of {n} values cannot be stored as {type_name(lib, type_)}",
            what=f"type {type_name(lib, type_)}",
        )
    return n // block * int(lib.c.ggml_type_size(type_))


def can_read(lib: Library, type_: int) -> bool:
    """Whether rows of the type can be turned into f32."""
    if type_ == F32:
        return True
    if block_values(lib, type_) == 0:
        return False
    return bool(lib.c.ggml_get_type_traits(type_).to_float != lib.ffi.NULL)


def can_write(lib: Library, type_: int) -> bool:
    """Whether f32 rows can be turned into the type."""
    return type_ in _WRITABLE and block_values(lib, type_) > 0


def needs_importance(lib: Library, type_: int) -> bool:
    """Whether ggml weighs the columns of this type, as an importance matrix would tell it."""
    return bool(lib.c.ggml_quantize_requires_imatrix(type_))


def to_f32(lib: Library, type_: int, data: Bytes, out: Floats) -> None:
    """Values of contiguous rows: `data` (nbytes,) u8 into `out` (n_rows, n_per_row) f32."""
    assert out.flags.c_contiguous
    n_bytes = len(out) * row_bytes(lib, type_, out.shape[1])
    if len(data) != n_bytes or not can_read(lib, type_):
        raise UnsupportedError(
            f"expected {n_bytes} bytes of a readable type, got {len(data)} of "
            f"{type_name(lib, type_)}",
            what=f"type {type_name(lib, type_)}",
        )
    if type_ == F32:
        out.reshape(-1).view(np.uint8)[:] = data
        return
    convert = lib.c.ggml_get_type_traits(type_).to_float
    convert(_pointer(lib, data, "void *"), _pointer(lib, out, "float *"), out.size)


def from_f32(lib: Library, type_: int, values: Floats, out: Bytes) -> None:
    """`values` (n_rows, n_per_row) f32 into the bytes of the type, `out` (nbytes,) u8.

    All columns weigh the same where ggml wants to be told what they weigh.
    """
    assert values.flags.c_contiguous
    n_rows, n_per_row = values.shape
    if not can_write(lib, type_) or len(out) != n_rows * row_bytes(lib, type_, n_per_row):
        raise UnsupportedError(
            f"{n_rows} rows of {n_per_row} values cannot be written as {type_name(lib, type_)}",
            what=f"type {type_name(lib, type_)}",
        )
    weights: Any = lib.ffi.NULL
    if needs_importance(lib, type_):
        ones = np.ones(n_per_row, np.float32)
        weights = _pointer(lib, ones, "float *")
    lib.c.ggml_quantize_chunk(
        type_,
        _pointer(lib, values, "float *"),
        _pointer(lib, out, "void *"),
        0,
        n_rows,
        n_per_row,
        weights,
    )


def largest(type_: int) -> float:
    """A bound that values of the type must keep: its numbers, or its blocks' factors, are F16."""
    return float(np.finfo(np.float32).max) if type_ in (F32, BF16) else _F16_MAX


def _pointer(lib: Library, array: NDArray[Any], kind: str) -> Any:
    return lib.ffi.cast(kind, array.ctypes.data)
