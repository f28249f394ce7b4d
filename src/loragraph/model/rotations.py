"""The tensors that rotate the inputs of folded weights: one matrix, signs for each width."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.handles import F32, Buffer, Tensor, TensorContext, array_view
from loragraph.ggml.lib import Library
from loragraph.model.fold import hadamard

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What the base product of a folded weight rotates its input by; one a width.

    matrix F32 [block, block] · signs F32 [width] or None
    """

    matrix: Tensor
    signs: Tensor | None


class Rotations:
    """The rotations that a model's weights have asked for, and their memory's content."""

    def __init__(self) -> None:
        self._by_width: dict[int, Rotation] = {}
        self._signs: dict[int, NDArray[np.float32]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_width)

    def of(
        self, ctx: TensorContext, block: int, width: int, signs: NDArray[np.float32] | None
    ) -> Rotation:
        """The rotation of inputs of this width; all share one matrix."""
        if width not in self._by_width:
            known = next(iter(self._by_width.values()), None)
            matrix = known.matrix if known else ctx.new_tensor(F32, (block, block))
            tensor = None
            if signs is not None:
                self._signs[width] = signs
                tensor = ctx.new_tensor(F32, (width,))
            self._by_width[width] = Rotation(matrix, tensor)
        return self._by_width[width]

    def place(self, lib: Library) -> Buffer:
        """Gives the tensors their memory and values; the caller owns the buffer."""
        matrix = next(iter(self._by_width.values())).matrix
        tensors = {0: matrix}
        tensors |= {w: one.signs for w, one in self._by_width.items() if one.signs is not None}
        sizes = [4 * one.ne[0] * one.ne[1] for one in tensors.values()]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = Buffer.allocate(lib, sum(rooms))
        starts = (end - room for end, room in zip(accumulate(rooms), rooms, strict=True))
        for (width, tensor), start in zip(tensors.items(), starts, strict=True):
            buffer.place(tensor, start)
            values = hadamard(matrix.ne[0]).ravel() if width == 0 else self._signs[width]
            array_view(lib, tensor)[:] = values
        return buffer
