"""The native attention over cells against the float64 twin, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from loragraph.errors import UnsupportedError
from loragraph.graph.stretches import Stretches
from loragraph.kernels.attention import AttendNode, AttentionStep, LayerShape
from loragraph.kernels.lowrank import forced_dispatch, function_address, instruction_sets
from loragraph.kernels.pairs import BF16, F16, F32, Q8_0
from tests.kernels.attention_cases import (
    Layer,
    Stretch,
    blocks,
    own_cells,
    prompt_chunk,
    run_native,
    to_lists,
)
from tests.kernels.cases import nmse

TYPES = [F32, F16, BF16, Q8_0]
# K and V are read exactly, products and sums are in f32: no bound depends on the storage type.
# exp turns a score's absolute error, about 1e-6 at a score of 8, into a relative one.
BOUND = 1e-11


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_dispatch(request.param):
        yield request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def check(layer: Layer, stretches: list[Stretch], n_rows: int, n_threads: int = 1) -> None:
    got = run_native(layer, stretches, n_rows, n_threads)
    assert nmse(got, layer.expected(stretches, n_rows)) <= BOUND


@pytest.mark.parametrize("types", list(product(TYPES, TYPES)))
def test_every_pair_of_types(isa: str, rng: np.random.Generator, types: tuple[int, int]) -> None:
    """Each storage type of K works with each of V."""
    layer = Layer.random(rng, 3, 256, (4, 2), (64, 64), types)
    check(layer, own_cells(rng, [40, 1, 70], 256), 3, 2)


@pytest.mark.parametrize("n_embd", [8, 16, 24, 40, 64, 72, 80, 96, 128, 192, 256])
def test_every_head_size(isa: str, rng: np.random.Generator, n_embd: int) -> None:
    """Head sizes are multiples of 8, whether or not vectors divide them."""
    layer = Layer.random(rng, 9, 128, (3, 1), (n_embd, n_embd))
    check(layer, prompt_chunk(45, 9, blocks(rng, 54, 128)), 9)


def test_unlike_head_sizes(isa: str, rng: np.random.Generator) -> None:
    """K and V heads may differ in size."""
    for sizes in ((96, 64), (40, 136)):
        layer = Layer.random(rng, 3, 256, (4, 2), sizes)
        check(layer, own_cells(rng, [40, 1, 70], 256), 3, 2)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (9, 3), (8, 2), (16, 2), (7, 1)])
def test_query_heads_share_kv_heads(
    isa: str, rng: np.random.Generator, heads: tuple[int, int]
) -> None:
    """Groups of 1, 2, 3, 4, 7 and 8 query heads a K/V head, alone and in tiles of rows."""
    layer = Layer.random(rng, 35, 512, heads, (32, 32))
    check(layer, prompt_chunk(70, 35, blocks(rng, 105, 512)), 35, 3)
    check(layer, own_cells(rng, [90, 33], 512), 2, 3)


@pytest.mark.parametrize("n_rows", [1, 2, 31, 64, 65, 130, 512])
def test_prompt_chunks(isa: str, rng: np.random.Generator, n_rows: int) -> None:
    """Rows of one prompt see the cells before it whole and its own up to themselves."""
    layer = Layer.random(rng, n_rows, 1024, (3, 1), (16, 16))
    check(layer, prompt_chunk(300, n_rows, blocks(rng, 300 + n_rows, 1024)), n_rows, 2)


@pytest.mark.parametrize("n_cells", [1, 31, 32, 33, 255, 256, 257, 2047, 2049, 3100])
def test_lengths_around_blocks_and_chunks(isa: str, rng: np.random.Generator, n_cells: int) -> None:
    """A row may see any number of cells: less than a block, many chunks."""
    layer = Layer.random(rng, 1, 3200, (2, 1), (16, 16))
    check(layer, own_cells(rng, [n_cells], 3200), 1, 2)


def test_single_scattered_cells(isa: str, rng: np.random.Generator) -> None:
    """Runs of one cell in any order."""
    layer = Layer.random(rng, 2, 500, (3, 1), (64, 64))
    cells = [int(c) for c in rng.permutation(500)]
    check(layer, [Stretch(cells[:300], [(0, 0, 300)]), Stretch(cells[300:], [(1, 3, 190)])], 2)


def test_shared_and_own_stretches(isa: str, rng: np.random.Generator) -> None:
    """Rows that share a prompt and go on in stretches of their own, with branches on the way."""
    layer = Layer.random(rng, 33, 2048, (9, 3), (64, 64))
    cells = blocks(rng, 2048, 2048)
    stretches = [Stretch(cells[:310], [(row, 0, 310) for row in range(33)])]
    stretches.append(Stretch(cells[320:330], [(row, 0, 10) for row in range(0, 33, 2)]))
    for row in range(33):
        start, n = 352 + 32 * row, 1 + row % 30
        stretches.append(Stretch(cells[start : start + n], [(row, 0, n)]))
    check(layer, stretches, 33, 2)


@pytest.mark.parametrize("window", [1, 20, 64, 300])
def test_sliding_window(isa: str, rng: np.random.Generator, window: int) -> None:
    """A window cuts a row's cells from the front, also whole chunks and the earlier stretch."""
    layer = Layer.random(rng, 100, 1024, (4, 2), (32, 32))
    check(layer, prompt_chunk(400, 100, blocks(rng, 500, 1024), window), 100, 2)


@pytest.mark.parametrize("size", [-30.0, 0.5, 30.0])
def test_sinks(isa: str, rng: np.random.Generator, size: float) -> None:
    """A score of each head takes its share of the weights, in rows of one chunk and of many,
    whether it is far below all others or far above."""
    layer = Layer.random(rng, 40, 2048, (4, 2), (64, 64))
    layer.sinks = (size + rng.standard_normal(4)).astype(np.float32)
    check(layer, prompt_chunk(30, 40, blocks(rng, 70, 256)), 40, 2)
    check(layer, own_cells(rng, [3, 900, 800], 2048), 3, 3)


def test_sinks_of_minus_infinity_are_none(isa: str, rng: np.random.Generator) -> None:
    """A sink that no exp can see changes nothing but the last bit."""
    layer = Layer.random(rng, 3, 1024, (2, 1), (32, 32))
    stretches = own_cells(rng, [5, 400, 40], 1024)
    plain = run_native(layer, stretches, 3)
    layer.sinks = np.full(2, -1e30, np.float32)
    np.testing.assert_allclose(run_native(layer, stretches, 3), plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type_", [F32, F16, Q8_0])
def test_v_may_be_the_first_values_of_k(isa: str, rng: np.random.Generator, type_: int) -> None:
    """Latent attention: many heads read one K, and its first values as V, in the same cells."""
    layer = Layer.random(rng, 20, 1024, (16, 1), (96, 96), (type_, type_))
    shape = replace(layer.shape, n_embd_v=64)
    one = replace(layer, shape=shape, v_data=layer.k_data, v=layer.k[..., :64])
    check(one, prompt_chunk(60, 20, blocks(rng, 80, 1024)), 20, 2)
    check(one, own_cells(rng, [300, 1, 64], 1024), 3, 3)


def test_softcap(isa: str, rng: np.random.Generator) -> None:
    """Scores are bent by c tanh(s / c), small and large ones."""
    layer = Layer.random(rng, 40, 256, (4, 2), (64, 64), softcap=5.0)
    layer.q[:20] *= 8
    layer.q[20:] *= np.float32(1e-3)
    check(layer, prompt_chunk(100, 40, blocks(rng, 140, 256)), 40)


def test_large_scores(isa: str, rng: np.random.Generator) -> None:
    """Scores far beyond what exp can hold give the weights of the largest ones."""
    layer = Layer.random(rng, 2, 512, (2, 1), (64, 64), (F32, F32))
    stretches = own_cells(rng, [100, 300], 512)
    layer.q *= 100
    got = run_native(layer, stretches, 2)
    # A score of 1,000 has an error of 6e-5 in f32, and so its exponential.
    assert nmse(got, layer.expected(stretches, 2)) <= 1e-7
    layer.q[:] = 0  # all weights alike
    check(layer, stretches, 2)


@pytest.mark.parametrize("types", [(F16, F16), (Q8_0, Q8_0)])
def test_row_alone_equals_row_in_a_step(
    isa: str, rng: np.random.Generator, types: tuple[int, int]
) -> None:
    """Bits of a row do not depend on other rows, their ranges or the number of threads."""
    layer = Layer.random(rng, 150, 2048, (6, 2), (64, 64), types)
    cells = blocks(rng, 2048, 2048)
    stretches = [
        Stretch(cells[:700], [(row, (row * 7) % 300, 700 - row) for row in range(150)]),
        Stretch(cells[704:860], [(row, 0, row + 1) for row in range(150)]),
        Stretch(cells[1000:1500], [(row, row, 300 + row) for row in range(0, 150, 3)]),
    ]
    whole = run_native(layer, stretches, 150)
    assert nmse(whole, layer.expected(stretches, 150)) <= BOUND
    for n_threads in (2, 3, 16):
        np.testing.assert_array_equal(run_native(layer, stretches, 150, n_threads), whole)
    for row in (0, 3, 64, 100, 149):
        alone = [
            Stretch(s.cells, [(0, begin, end) for r, begin, end in s.seen if r == row])
            for s in stretches
        ]
        alone = [s for s in alone if s.seen]
        out = run_native(layer, alone, 1, rows=[row])
        np.testing.assert_array_equal(out[0], whole[row])


def test_hidden_cells_do_no_harm(isa: str, rng: np.random.Generator) -> None:
    """NaN and infinity in cells that a row does not see never reach it."""
    layer = Layer.random(rng, 40, 256, (3, 1), (64, 64))
    stretches = prompt_chunk(60, 40, blocks(rng, 100, 256))
    clean = run_native(layer, stretches, 40)
    own = stretches[-1].cells[25:]
    layer.k_data.view(np.float16).reshape(256, -1)[own] = np.nan
    layer.v_data.view(np.float16).reshape(256, -1)[own] = np.inf
    spoilt = run_native(layer, stretches, 40)
    np.testing.assert_array_equal(spoilt[:25], clean[:25])
    assert not np.isfinite(spoilt[25:]).any()


def test_instruction_sets_agree(rng: np.random.Generator) -> None:
    """Every instruction set of this CPU computes the same up to the rounding of sums."""
    layer = Layer.random(rng, 20, 512, (4, 2), (80, 80))
    stretches = prompt_chunk(300, 20, blocks(rng, 320, 512))
    results = {}
    for name in instruction_sets():
        with forced_dispatch(name):
            results[name] = run_native(layer, stretches, 20)
    for result in results.values():
        assert nmse(result, results["portable"].astype(np.float64)) <= BOUND


def test_steps_follow_each_other(rng: np.random.Generator) -> None:
    """One plan object serves small and large steps in turn; its struct stays where it is."""
    layer = Layer.random(rng, 300, 4096, (2, 1), (16, 16))
    step = AttentionStep(2)
    struct = step.struct
    for n in (1, 300, 2, 300):
        step.write(to_lists(prompt_chunk(3000, n, range(3300))), n, layer.n_cells)
        assert step.n_units > 0
        assert step.n_partials >= n
    step.write(Stretches.of_one(5, 3), 3, 4096)
    assert step.n_partials == 0
    assert step.struct == struct


def test_false_lists_are_refused() -> None:
    """What would read outside the cache or leave a row without a result never becomes a plan."""
    step = AttentionStep(1)
    good = Stretch(range(10, 20), [(0, 0, 10), (1, 2, 3)])
    step.write(to_lists([good]), 2, 20)
    assert step.n_units == 1
    for stretch, n_rows, n_cells, message in (
        (good, 2, 19, "leaves the cache"),
        (good, 1, 20, "names a row"),
        (good, 3, 20, "sees no cell"),
        (Stretch(range(4), [(0, 0, 5)]), 1, 20, "leaves its stretch"),
        (Stretch(range(4), [(0, 2, 2)]), 1, 20, "empty"),
        (Stretch(range(4), [(0, -1, 2)]), 1, 20, "leaves its stretch"),
    ):
        with pytest.raises(ValueError, match=message):
            step.write(to_lists([stretch]), n_rows, n_cells)
        assert step.n_units == 0


def test_torn_lists_are_refused() -> None:
    """Pointers that do not fit their arrays, and arrays of another type, are refused."""
    step, good = AttentionStep(1), to_lists([Stretch(range(4), [(0, 0, 4)])])
    wide: Any = np.ones(1)
    two = np.zeros(2, np.int32)
    for change, message in (
        ({"run_ptr": np.array([0, 2], np.int32)}, "pointers do not fit"),
        ({"row_ptr": np.array([1, 1], np.int32)}, "pointers do not fit"),
        ({"row_ptr": np.zeros(1, np.int32)}, r"row_ptr: expected contiguous \(2,\) i32"),
        ({"row_end": two}, r"row_end: expected contiguous \(1,\) i32, got \(2,\)"),
        ({"row_end": wide}, "row_end: expected contiguous .* float64"),
    ):
        with pytest.raises(ValueError, match=message):
            step.write(replace(good, **change), 1, 8)


def test_unsupported_shapes_are_named() -> None:
    """Head sizes, types and groups that the kernel does not read are the user's errors."""
    step = AttentionStep(1)
    for shape, message in (
        (LayerShape(2, 1, 60, 64, F16, F16, 1.0), "divisible by 8, got 60"),
        (LayerShape(2, 1, 64, 48, F16, Q8_0, 1.0), "multiple of 32 values, got 48"),
        (LayerShape(2, 1, 64, 64, 12, F16, 1.0), "got ggml type 12"),
        (LayerShape(400, 1, 64, 64, F16, F16, 1.0), "query heads a K/V head"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            AttendNode(step, shape)
    with pytest.raises(ValueError, match="no multiple"):
        AttendNode(step, LayerShape(5, 2, 64, 64, F16, F16, 1.0))


def test_nodes_share_no_function() -> None:
    """Both kernels have addresses of their own, as a custom node needs them."""
    names = ("loragraph_attention_attend", "loragraph_attention_reduce")
    assert len({function_address(name) for name in names} - {0}) == 2
