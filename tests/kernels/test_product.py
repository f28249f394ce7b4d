"""The int8 products against numpy, bit for bit: exact sums of blocks, one fma a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loragraph.kernels.library import ffi, forced_dispatch, instruction_sets, lib
from loragraph.kernels.product import (
    Layout,
    ProductInputNode,
    ProductNode,
    min_rows,
    quantized_size,
)

F32 = NDArray[np.float32]
TYPES = {
    Layout.Q4_0X8: GGMLQuantizationType.Q4_0,
    Layout.Q4_1: GGMLQuantizationType.Q4_1,
    Layout.Q8_0: GGMLQuantizationType.Q8_0,
}


def kernels() -> Iterator[tuple[str, Layout]]:
    """The instruction sets of this CPU, with the layouts that each multiplies."""
    for name in instruction_sets():
        with forced_dispatch(name):
            yield from [(name, layout) for layout in TYPES if min_rows(layout)]


@pytest.fixture(
    scope="module", params=list(kernels()), ids=lambda kernel: "-".join(map(str, kernel))
)
def layout(request: pytest.FixtureRequest) -> Iterator[Layout]:
    """A layout, with an instruction set that multiplies it in force; none: the test is skipped."""
    name, layout = request.param
    with forced_dispatch(name):
        yield layout


def product(
    w: NDArray[np.uint8],
    layout: Layout,
    n_out: int,
    x: F32,
    n_threads: int = 1,
    computed_under: str | None = None,
) -> F32:
    """y (n, n_out) by the nodes, each thread's part after the other's; rows of y apart.

    `computed_under`: another instruction set than the one that the nodes are made under.
    """
    n, n_in = x.shape
    quantized = np.full(quantized_size(n_in, n, layout) + 64, 0xA5, np.uint8)
    y = np.full((n, n_out + 3), np.nan, np.float32)
    source = ProductInputNode(n_in, n, layout)
    source.bind(x.ctypes.data, x.strides[0] // 4, quantized.ctypes.data)
    node = ProductNode(source, w.ctypes.data, n_out)
    node.bind(y.ctypes.data, n_out + 3)
    other = forced_dispatch(computed_under) if computed_under else nullcontext()
    with other:
        for function, one in (("loragraph_product_input", source), ("loragraph_product", node)):
            for ith in range(n_threads):
                getattr(lib, function)(ffi.NULL, ith, n_threads, ffi.cast("void *", one.userdata))
    assert (quantized[-64:] == 0xA5).all()
    assert np.isnan(y[:, n_out:]).all()
    return y[:, :n_out].copy()


def test_a_node_runs_the_kernels_it_was_made_for(layout: Layout) -> None:
    """The quantised x has their size: under another instruction set it would be another's."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 64), dtype=np.float32)
    w = packed(rng.standard_normal((16, 64), dtype=np.float32), layout).memory
    expected = product(w, layout, 16, x)
    for name in instruction_sets():
        assert np.array_equal(product(w, layout, 16, x, computed_under=name), expected)


class Packed(NamedTuple):
    """Weights (n_out, n_in): as memory and as numbers."""

    memory: NDArray[np.uint8]
    integers: NDArray[np.int64]  # (n_out, n_blocks, 32)
    scales: F32  # (n_out, n_blocks)
    minimums: F32 | None = None  # (n_out, n_blocks), of Q4_1


def packed(values: F32, layout: Layout) -> Packed:
    """Quantised by the gguf package, in the memory of the layout."""
    n_out, n_in = values.shape
    n_blocks = n_in // 32
    raw = gguf.quants.quantize(values, TYPES[layout]).reshape(n_out, n_blocks, -1)
    d = halves(raw[..., :2])
    q = raw[..., 2:]
    if layout is Layout.Q8_0:
        return Packed(raw, q.view(np.int8).astype(np.int64), d)
    if layout is Layout.Q4_1:
        return Packed(raw, nibbles(q[..., 2:]), d, halves(q[..., :2]))
    memory = np.empty((n_out // 8, n_blocks, 144), np.uint8)
    scales = raw[..., :2].reshape(n_out // 8, 8, n_blocks, 2).transpose(0, 2, 1, 3)
    memory[..., :16] = scales.reshape(n_out // 8, n_blocks, 16)
    octets = q.reshape(n_out // 8, 8, n_blocks, 2, 8).transpose(0, 2, 3, 1, 4)
    memory[..., 16:] = octets.reshape(n_out // 8, n_blocks, 128) ^ 0x88
    return Packed(memory, nibbles(q) - 8, d)


def halves(raw: NDArray[np.uint8]) -> F32:
    """F16 in the last axis's two bytes."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def nibbles(raw: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The low ones of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], -1).astype(np.int64)


def quantized_x(x: F32) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """ggml's Q8_0 of x: integers (n, n_blocks, 32), scales (n, n_blocks)."""
    blocks = x.reshape(len(x), -1, 32)
    top = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    d = (top / np.float32(127)).astype(np.float16).astype(np.float32)
    return np.rint(blocks * inverse[..., None]).astype(np.int64), d


def expected(w: Packed, x: F32) -> F32:
    """The product with one fma a block, with minimums two: float64 holds the exact sum, which is
    then rounded once.
    """
    q, dx = quantized_x(x)
    y = np.zeros((len(x), len(w.scales)), np.float32)
    for block in range(q.shape[1]):
        sums = (q[:, block] @ w.integers[:, block].T).astype(np.float64)
        y = fma(dx[:, block, None] * w.scales[None, :, block], sums, y)
        if w.minimums is not None:
            x_sums = dx[:, block] * q[:, block].sum(-1).astype(np.float32)
            y = fma(w.minimums[None, :, block], x_sums[:, None].astype(np.float64), y)
    return y


def fma(a: F32, b: NDArray[np.float64], c: F32) -> F32:
    """a * b + c, rounded once."""
    return (a.astype(np.float64) * b + c.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("n_in", [32, 96, 1024, 1056, 2080])
@pytest.mark.parametrize("n_rows", [1, 2, 7, 16, 31, 135])
def test_bits(layout: Layout, n_in: int, n_rows: int) -> None:
    """Any number of rows and blocks, over the borders of tiles, of row blocks and of unpacking."""
    rng = np.random.default_rng(n_in + n_rows)
    values = rng.standard_normal((48, n_in)).astype(np.float32)
    x = rng.standard_normal((n_rows, n_in)).astype(np.float32)
    w = packed(values, layout)

    assert np.array_equal(product(w.memory, layout, 48, x), expected(w, x))


@settings(max_examples=40, deadline=None)
@given(
    n_threads=st.integers(1, 9),
    n_rows=st.integers(1, 40),
    n_tiles=st.integers(1, 5),
    n_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_threads_and_other_rows_change_no_bit(
    layout: Layout, n_threads: int, n_rows: int, n_tiles: int, n_blocks: int, seed: int
) -> None:
    """A row's product is the same alone, and with any number of threads."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((16 * n_tiles, 32 * n_blocks)).astype(np.float32)
    x = (rng.standard_normal((n_rows, 32 * n_blocks)) * 10.0 ** rng.integers(-6, 6)).astype(
        np.float32
    )
    w = packed(values, layout)
    y = product(w.memory, layout, 16 * n_tiles, x, n_threads)
    row = int(rng.integers(n_rows))
    alone = product(w.memory, layout, 16 * n_tiles, x[row : row + 1])

    assert np.array_equal(y[row], alone[0])


def test_extremes(layout: Layout) -> None:
    """The largest sums of a block do not overflow; zeros give zeros; -0.0 and tiny values pass."""
    values = np.full((16, 64), -8.0, np.float32)
    x = np.zeros((4, 64), np.float32)
    x[0], x[1, ::2], x[2] = 3e4, -0.0, 1e-30
    w = packed(values, layout)
    y = product(w.memory, layout, 16, x)

    assert np.array_equal(y, expected(w, x))
    assert (y[0] < -1e6).all()
    assert (y[1:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 5, 31])
def test_what_is_not_finite_stays_so(bad: float, position: int, layout: Layout) -> None:
    """A row with NaN or infinity gives no finite number, and other rows do not see it."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    w = packed(rng.standard_normal((16, 64)).astype(np.float32), layout)
    clean = expected(w, x)
    x[2, position] = bad
    y = product(w.memory, layout, 16, x)

    assert not np.isfinite(y[2]).any()
    assert np.array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


def test_strided_x(layout: Layout) -> None:
    """Rows of x may stand apart, as in a view."""
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((6, 100)).astype(np.float32)
    w = packed(rng.standard_normal((16, 64)).astype(np.float32), layout)

    y = product(w.memory, layout, 16, wide[:, :64])
    assert np.array_equal(y, expected(w, np.ascontiguousarray(wide[:, :64])))


def test_wrong_sizes_are_refused() -> None:
    """What the kernel would read out of bounds never reaches it."""
    with pytest.raises(ValueError, match="multiple of 32"):
        ProductInputNode(48, 1, Layout.Q8_0)
    with pytest.raises(ValueError, match="multiple of 16"):
        ProductNode(ProductInputNode(32, 1, Layout.Q8_0), 1, 24)
