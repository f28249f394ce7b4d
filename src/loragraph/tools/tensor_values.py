"""Whole tensors of a model file as f32, read with plain reads: for tools that need all of one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import can_read, row_bytes, to_f32, type_name

_PIECE_BYTES = 1 << 24


def read_f32(lib: Library, info: TensorInfo) -> NDArray[np.float32]:
    """A tensor's values, (n_rows, n_in) f32 with all rows of all experts, or (1, n) of a vector.

    GGUFError where the file cannot be read or holds values that are not finite, UnsupportedError
    for a type without values.
    """
    n_in = info.ne[0]
    if not can_read(lib, info.type):
        raise UnsupportedError(
            f"{info.path}: {info.name}: ggml cannot read type {type_name(lib, info.type)}",
            what=f"type {type_name(lib, info.type)}",
        )
    n_rows, row = info.n_elements // n_in, row_bytes(lib, info.type, n_in)
    values = np.empty((n_rows, n_in), np.float32)
    step = max(1, _PIECE_BYTES // row)
    try:
        with info.path.open("rb") as file:
            file.seek(info.offset)
            for start in range(0, n_rows, step):
                part = values[start : start + step]
                data = np.frombuffer(file.read(len(part) * row), np.uint8)
                if len(data) != len(part) * row:
                    raise GGUFError("the file became shorter while it was read", path=info.path)
                to_f32(lib, info.type, data, part)
    except OSError as exc:
        raise GGUFError(f"failed to read: {exc.strerror or exc}", path=info.path) from exc
    if not np.isfinite(values).all():
        raise GGUFError(
            "expected finite values, got NaN or infinity", path=info.path, where=info.name
        )
    return values
