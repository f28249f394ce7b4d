"""Rows of a placed weight as f32, read from the model's file whatever became of them in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import UnsupportedError
from loragraph.model.weights import Weight, Weights


class WeightRows:
    """The values of a model's weights; a repacked weight's are still in the file."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a matrix, (n, n_in) f32, its factor w_s included.

        UnsupportedError for a type whose values cannot be read here.
        """
        import gguf  # here, because importing it is slow

        weight = self._weights.by_name[name]
        n_in, n_out = weight.ne[0], weight.ne[1]
        assert 0 <= first <= last <= n_out
        row_bytes = weight.info.nbytes // n_out
        lib, start = self._weights.lib, first * row_bytes
        pointer = lib.ffi.cast("char *", self._weights.files.pointer(weight.info)) + start
        data = np.frombuffer(lib.ffi.buffer(pointer, (last - first) * row_bytes), np.uint8)
        try:
            kind = gguf.GGMLQuantizationType(weight.info.type)
            values = gguf.dequantize(data.reshape(last - first, row_bytes), kind)
        except (ValueError, NotImplementedError) as exc:
            raise UnsupportedError(
                f"{name}: weights of type {weight.info.type} cannot be read as numbers here",
                what=f"type {weight.info.type}",
            ) from exc
        rows: NDArray[np.float32] = np.array(values, np.float32).reshape(last - first, n_in)
        return rows * self._scale(weight)

    def _scale(self, weight: Weight) -> np.float32:
        """The factor w_s of a matrix, 1 where it has none."""
        if weight.scale is None:
            return np.float32(1)
        lib = self._weights.lib
        pointer = self._weights.files.pointer(weight.scale.info)
        return np.float32(np.frombuffer(lib.ffi.buffer(pointer, 4), np.float32)[0])
