"""Tensors of a model's files as f32, read with plain reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import TOKEN_EMBD
from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import can_read, row_bytes, to_f32, type_name
from loragraph.model.files import ModelFiles
from loragraph.model.fold import PREFIX

_PIECE_BYTES = 1 << 24


class FileRows:
    """The base's weights for what depends on them (DoRA's magnitudes): `BaseRows` over files."""

    def __init__(self, lib: Library, files: ModelFiles) -> None:
        self._lib = lib
        self._tensors = files.tensors
        self._folded = any(key.startswith(PREFIX) for key in files.metadata)

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a matrix, (n, n_in) f32, its factor w_s included.

        UnsupportedError for the rotated weights of a Hadamard-folded base.
        """
        if self._folded:
            raise UnsupportedError(
                f"{name}: the weights of a Hadamard-folded base are rotated",
                what="DoRA on a folded base",
                hint="use a base that is not folded",
            )
        info = self._tensors.get(name) or self._tensors[TOKEN_EMBD]  # a tied head
        values = read_f32(self._lib, info, first, last)
        factor = self._tensors.get(info.name.removesuffix(".weight") + ".scale")
        if factor is not None and name != TOKEN_EMBD:
            values *= read_f32(self._lib, factor).reshape(-1)[0]
        return values


def read_f32(
    lib: Library, info: TensorInfo, first: int = 0, last: int | None = None
) -> NDArray[np.float32]:
    """A tensor's values, (n_rows, n_in) f32 with the rows of all experts, or (1, n) of a vector.

    `first` and `last` choose rows [first, last).

    GGUFError where the file cannot be read or holds values that are not finite, UnsupportedError
    for a type without values.
    """
    n_in = info.ne[0]
    if not can_read(lib, info.type):
        raise UnsupportedError(
            f"{info.path}: {info.name}: ggml cannot read type {type_name(lib, info.type)}",
            what=f"type {type_name(lib, info.type)}",
        )
    row = row_bytes(lib, info.type, n_in)
    n_rows = (info.n_elements // n_in if last is None else last) - first
    values = np.empty((n_rows, n_in), np.float32)
    step = max(1, _PIECE_BYTES // row)
    try:
        with info.path.open("rb") as file:
            file.seek(info.offset + first * row)
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
