"""Values of adapter tensors: which ggml types are read, what their bytes mean.

All functions take one tensor's bytes, (nbytes,) u8, and work piece by piece, so that the memory
they need does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.handles import BF16, F16, F32, Q8_0

Bytes = NDArray[np.uint8]

TYPE_NAMES = {F32: "F32", F16: "F16", BF16: "BF16", Q8_0: "Q8_0"}
"""The ggml types of adapter tensors, number -> name."""

_BLOCK_Q8_0 = np.dtype([("d", "<u2"), ("qs", "i1", 32)])  # 32 values: qs · d, d as F16
_DTYPES: dict[int, np.dtype[Any]] = {
    F32: np.dtype("<u4"),
    F16: np.dtype("<u2"),
    BF16: np.dtype("<u2"),
    Q8_0: _BLOCK_Q8_0,
}
_EXPONENTS = {F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80}
_PIECE_BYTES = 1 << 20
_FEW = 64


def all_finite(type_: int, data: Bytes) -> bool:
    """Whether no value is an infinity or NaN: an exponent of all ones in any of the types."""
    float_type = F16 if type_ == Q8_0 else type_
    mask = _EXPONENTS[float_type]
    for piece in _pieces(type_, data):
        bits = piece["d"] if type_ == Q8_0 else piece
        if (bits & mask).max(initial=0) == mask:
            return False
    return True


def all_zero(type_: int, data: Bytes) -> bool:
    """Whether every value is 0 or -0."""
    for piece in _pieces(type_, data):
        if type_ == Q8_0:
            if np.any(((piece["d"] & 0x7FFF) != 0) & piece["qs"].any(axis=1)):
                return False
        # Without the sign; the first few values decide for all but an empty adapter.
        elif np.any(piece[:_FEW] << 1) or np.any(piece[_FEW:] << 1):
            return False
    return True


def dequantised(type_: int, data: Bytes, ne: tuple[int, ...]) -> NDArray[np.float32]:
    """The tensor's values, f32 in numpy order: ne reversed, leading ones dropped down to 2-D."""
    items = data.view(_DTYPES[type_])
    values: NDArray[np.float32]
    if type_ == Q8_0:
        scales = np.ascontiguousarray(items["d"]).view("<f2").astype(np.float32)
        values = items["qs"].astype(np.float32) * scales[:, None]
    elif type_ == BF16:
        values = (items.astype(np.uint32) << 16).view(np.float32)
    else:
        values = items.view("<f4" if type_ == F32 else "<f2").astype(np.float32)
    shape = tuple(reversed(ne))
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return values.reshape(shape)


def _pieces(type_: int, data: Bytes) -> Iterator[NDArray[Any]]:
    items = data.view(_DTYPES[type_])
    step = max(1, _PIECE_BYTES // items.itemsize)
    for start in range(0, len(items), step):
        yield items[start : start + step]
