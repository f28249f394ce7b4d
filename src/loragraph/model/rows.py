"""Rows of a placed weight as f32, read from the model's file whatever became of them in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import UnsupportedError
from loragraph.ggml.quants import to_f32
from loragraph.model.weights import Weight, Weights

_FOLDED = "prism.hadamard."  # keys of files whose weights were rotated when they were made


class WeightRows:
    """The values of a model's weights; a repacked weight's are still in the file."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a matrix, (n, n_in) f32, the caller's; its factor w_s is included.

        UnsupportedError for a type whose values cannot be read, and for rotated weights.
        """
        weight = self._weights.by_name[name]
        if any(key.startswith(_FOLDED) for key in self._weights.files.metadata):
            raise UnsupportedError(
                f"{name}: the weights of a Hadamard-folded base are rotated",
                what="DoRA on a folded base",
                hint="use a base that is not folded",
            )
        n_in, n_out = weight.ne[0], weight.ne[1]
        assert 0 <= first <= last <= n_out
        row_bytes = weight.info.nbytes // n_out
        out = np.empty((last - first, n_in), np.float32)
        data = self._bytes(weight, first * row_bytes, (last - first) * row_bytes)
        to_f32(self._weights.lib, weight.info.type, data, out)
        scale = self._scale(weight)
        if scale != 1:
            out *= scale
        return out

    def _bytes(self, weight: Weight, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of a weight in the mapped file, borrowed."""
        lib, files = self._weights.lib, self._weights.files
        pointer = lib.ffi.cast("char *", files.pointer(weight.info)) + start
        return np.frombuffer(lib.ffi.buffer(pointer, nbytes), np.uint8)

    def _scale(self, weight: Weight) -> np.float32:
        """The factor w_s of a matrix, 1 where it has none."""
        if weight.scale is None:
            return np.float32(1)
        return np.float32(self._bytes(weight.scale, 0, 4).view(np.float32)[0])
