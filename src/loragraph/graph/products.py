"""The base part of a linear layer, W x: ggml's product, or our kernel where it is much faster.

The kernel reads ggml's own layouts, so weights stay as they are. Where ggml repacked a weight, a
block of it is compared with the file: another build of ggml may interleave in another way, and
then its own product serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.handles import F16, F32, I8, Q4_0, Q4_1, Q8_0, Tensor, data_address, memory
from loragraph.ggml.ops import Ops
from loragraph.kernels.product import (
    BLOCK,
    COLUMNS,
    X8_BYTES,
    F16ProductNode,
    Layout,
    ProductInputNode,
    ProductNode,
    min_rows,
    quantized_size,
)
from loragraph.model.files import ModelFiles
from loragraph.model.weights import Use, Weight

_Q4_0_BYTES = 18  # of a block: F16 d, 16 bytes of two values


class GraphProducts(Protocol):
    """The base products of one graph."""

    def mul_mat(self, ops: Ops, w: Weight, x: Tensor) -> Tensor:
        """W x: F32 [n_out, n] of x F32 [n_in, n]."""

    def bind(self) -> None:
        """Called once the graph has memory: addresses of its tensors are final."""


class GgmlProducts:
    """ggml's own."""

    def mul_mat(self, ops: Ops, w: Weight, x: Tensor) -> Tensor:
        """ggml's product."""
        return ops.mul_mat(w.tensor, x)

    def bind(self) -> None:
        """Nothing to do."""


class KernelProducts:
    """Our kernel for the weights in `layouts`, by name; ggml's product for the others."""

    def __init__(self, layouts: dict[str, Layout]) -> None:
        self._layouts = layouts
        self._inputs: list[tuple[ProductInputNode, Tensor, Tensor]] = []
        self._products: list[tuple[ProductNode, Tensor]] = []
        self._f16_products: list[tuple[F16ProductNode, Tensor, Tensor]] = []

    def mul_mat(self, ops: Ops, w: Weight, x: Tensor) -> Tensor:
        """One node to quantise x, unless the product before read the same, and one to multiply."""
        layout = self._layouts.get(w.name)
        if layout is None or x.type != F32 or x.ne[2:] != (1, 1):
            return ops.mul_mat(w.tensor, x)
        if not 0 < min_rows(layout) <= x.ne[1]:
            return ops.mul_mat(w.tensor, x)
        if layout is Layout.F16:
            return self._mul_mat_f16(ops, w, x)
        n_in, n_out = w.ne[:2]
        n_rows = x.ne[1]
        if not self._inputs or not _feeds(self._inputs[-1], x, layout):
            source = ProductInputNode(n_in, n_rows, layout)
            size = (quantized_size(n_in, n_rows, layout),)
            done = ops.custom(I8, size, [x], source.function, source.userdata)
            self._inputs.append((source, x, done))
        source, _, done = self._inputs[-1]
        node = ProductNode(source, data_address(w.tensor), n_out)
        y = ops.custom(F32, (n_out, n_rows), [done], node.function, node.userdata)
        self._products.append((node, y))
        return y

    def _mul_mat_f16(self, ops: Ops, w: Weight, x: Tensor) -> Tensor:
        n_in, n_out = w.ne[:2]
        node = F16ProductNode(data_address(w.tensor), n_in, n_out, x.ne[1])
        y = ops.custom(F32, (n_out, x.ne[1]), [x], node.function, node.userdata)
        self._f16_products.append((node, x, y))
        return y

    def bind(self) -> None:
        """Hands the nodes their addresses."""
        for source, x, done in self._inputs:
            source.bind(data_address(x), x.ptr.nb[1] // 4, data_address(done))
        for node, y in self._products:
            node.bind(data_address(y), y.ptr.nb[1] // 4)
        for f16, x, y in self._f16_products:
            f16.bind(data_address(x), x.ptr.nb[1] // 4, data_address(y), y.ptr.nb[1] // 4)


def _feeds(found: tuple[ProductInputNode, Tensor, Tensor], x: Tensor, layout: Layout) -> bool:
    return found[1] is x and found[0].layout is layout


def product_layouts(weights: Iterable[Weight], files: ModelFiles) -> dict[str, Layout]:
    """The weights that our kernel multiplies on this CPU, by name."""
    found = ((weight.name, _layout(weight, files)) for weight in weights)
    return {name: layout for name, layout in found if layout is not None}


def _layout(weight: Weight, files: ModelFiles) -> Layout | None:
    if weight.use is not Use.LINEAR:
        return None
    layout = _layout_in_memory(weight, files)
    return layout if layout is not None and min_rows(layout) else None


def _layout_in_memory(weight: Weight, files: ModelFiles) -> Layout | None:
    if weight.tensor.type == F16 and not weight.repacked:
        return Layout.F16
    if weight.ne[0] % BLOCK or weight.ne[1] % COLUMNS:
        return None
    if weight.tensor.type == Q8_0 and not weight.repacked:
        return Layout.Q8_0
    if weight.tensor.type == Q4_1 and not weight.repacked:
        return Layout.Q4_1
    if weight.tensor.type == Q4_0 and weight.repacked:
        row_bytes = weight.ne[0] // BLOCK * _Q4_0_BYTES
        rows = memory(files.pointer(weight.info), 8 * row_bytes).reshape(8, row_bytes)
        is_x8 = memory(weight.tensor.ptr.data, X8_BYTES).tobytes() == interleaved(rows).tobytes()
        return Layout.Q4_0X8 if is_x8 else None
    return None


def interleaved(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first block of eight rows of Q4_0 (8, row bytes) u8, as Layout.Q4_0X8: (144,) u8."""
    values = rows[:, 2:_Q4_0_BYTES].reshape(8, 2, 8).transpose(1, 0, 2) ^ 0x88
    return np.concatenate([rows[:, :2].ravel(), values.ravel()])
