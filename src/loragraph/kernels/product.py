"""The native product nodes: base weights times many rows, in int8 or in F32 (product.h).

In: addresses of x, w and y. Out: addresses (`function`, `userdata`) for custom nodes.
"""

from __future__ import annotations

from enum import IntEnum

from loragraph.kernels.library import CustomNode, ffi, lib

COLUMNS = 16
"""n_out of a product in int8 is a multiple of this."""

BLOCK = 32
"""n_in of a product in int8 is a multiple of this."""

X8_BYTES = 144
"""Of one block of eight interleaved rows of Q4_0: eight F16 scales, then the values."""


class Layout(IntEnum):
    """How a weight lies in memory."""

    Q4_0X8 = 0  # ggml's repacked Q4_0: eight rows interleaved by eight bytes
    Q8_0 = 1  # plain rows
    F16 = 2  # plain rows; of F16ProductNode alone
    Q4_1 = 3  # plain rows


def min_rows(layout: Layout) -> int:
    """From how many rows of x on this CPU's kernel is faster than ggml's product; 0: no kernel."""
    return int(lib.loragraph_product_min_rows(int(layout)))


def quantized_size(n_in: int, n_rows: int, layout: Layout) -> int:
    """Bytes of x F32 [n_in, n_rows], quantised for products with weights of `layout`."""
    return int(lib.loragraph_quantized_size(n_in, n_rows, int(layout)))


class ProductInputNode(CustomNode):
    """Quantises x [n_in, n_rows] for the products that read it, with weights of one layout."""

    function_name = "loragraph_product_input"

    def __init__(self, n_in: int, n_rows: int, layout: Layout) -> None:
        if n_in % BLOCK or min(n_in, n_rows) < 1:
            raise ValueError(f"expected n_in a multiple of {BLOCK}, got {n_in} x {n_rows}")
        self.n_in, self.n_rows, self.layout = n_in, n_rows, layout
        sizes = {"n_in": n_in, "n_rows": n_rows, "layout": int(layout)}
        kernels = lib.loragraph_product_kernels()
        self._struct = ffi.new("product_input_node *", {**sizes, "kernels": kernels})

    def bind(self, x: int, x_stride: int, quantized: int) -> None:
        """Addresses of x and of the quantised x; the stride in floats."""
        self._struct.x = ffi.cast("float *", x)
        self._struct.x_stride = x_stride
        self._struct.quantized = ffi.cast("void *", quantized)


class ProductNode(CustomNode):
    """y [n_out, n_rows] = w x, with w at address `w`."""

    function_name = "loragraph_product"

    def __init__(self, source: ProductInputNode, w: int, n_out: int) -> None:
        if n_out % COLUMNS or n_out < 1:
            raise ValueError(f"expected n_out a multiple of {COLUMNS}, got {n_out}")
        self._source = source
        self._struct = ffi.new(
            "product_node *",
            {
                "input": source._struct,
                "w": ffi.cast("void *", w),
                "layout": int(source.layout),
                "n_out": n_out,
            },
        )

    def bind(self, y: int, y_stride: int) -> None:
        """Address of y; the stride in floats."""
        self._struct.y = ffi.cast("float *", y)
        self._struct.y_stride = y_stride


class F16ProductNode(CustomNode):
    """y [n_out, n_rows] = w x in F32, with w F16 [n_in, n_out] at address `w`."""

    function_name = "loragraph_product_f16"

    def __init__(self, w: int, n_in: int, n_out: int, n_rows: int) -> None:
        if min(n_in, n_out, n_rows) < 1:
            raise ValueError(f"expected sizes from 1 on, got {n_in} x {n_out} x {n_rows}")
        own = {"n_in": n_in, "n_out": n_out, "n_rows": n_rows}
        own |= {"w": ffi.cast("uint16_t *", w), "kernels": lib.loragraph_product_kernels()}
        self._struct = ffi.new("product_f16_node *", own)

    def bind(self, x: int, x_stride: int, y: int, y_stride: int) -> None:
        """Addresses of x and y; the strides in floats."""
        self._struct.x = ffi.cast("float *", x)
        self._struct.x_stride = x_stride
        self._struct.y = ffi.cast("float *", y)
        self._struct.y_stride = y_stride
