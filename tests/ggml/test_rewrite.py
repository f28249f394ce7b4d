"""Rewriting rows: the sums of the naive twin, the bytes of ggml's own quantisers, in any pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.errors import UnsupportedError
from loragraph.ggml.lib import load_library
from loragraph.ggml.quants import Bytes, Floats, can_read, can_write, from_f32, row_bytes, to_f32
from loragraph.ggml.rewrite import row_rewriter
from loragraph.kernels.library import forced_dispatch, instruction_sets
from loragraph.kernels.rewrite import RowChange, RowRewriter
from tests.reference.rewrite import changed

LIB = load_library()
# ggml makes their tables for many seconds; IQ2_XXS, which has such a table too, stands for them.
_SLOW = {GGMLType.IQ1_S, GGMLType.IQ1_M, GGMLType.IQ2_XS, GGMLType.IQ2_S}
BOTH = [
    type_
    for type_ in GGMLType
    if type_ not in _SLOW and can_write(LIB, type_) and can_read(LIB, type_)
]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU."""
    with forced_dispatch(request.param):
        yield request.param


def rows(n_out: int, n_in: int, seed: int = 0) -> Floats:
    """A weight."""
    return np.random.default_rng(seed).standard_normal((n_out, n_in), dtype=np.float32)


def change_of(n_out: int, n_in: int, rank: int, gain: str = "") -> RowChange:
    """A random change of the size of the weight; `gain` of "rows", "columns" or neither."""
    rng = np.random.default_rng(7)
    left = rng.standard_normal((n_out, rank), dtype=np.float32)
    right = rng.standard_normal((rank, n_in), dtype=np.float32) / np.float32(max(rank, 1) ** 0.5)
    shape = {"rows": (n_out, 1), "columns": (1, n_in)}.get(gain)
    gains = None if shape is None else rng.uniform(-0.5, 0.5, shape).astype(np.float32)
    return RowChange(left, right, gains)


def stored(values: Floats, type_: int) -> Bytes:
    """The rows in a type's bytes."""
    data = np.empty(len(values) * row_bytes(LIB, type_, values.shape[1]), np.uint8)
    from_f32(LIB, type_, values, data)
    return data


def rewritten(rewriter: RowRewriter, source: Bytes, first: int = 0) -> Bytes:
    """What becomes of rows, from row `first` of the change on."""
    out = np.full(len(source) // rewriter.format.source_row * rewriter.format.stored_row, 99, "u1")
    assert rewriter.run(first, source, out, rewriter.scratch()) is None
    return out


@pytest.mark.parametrize("gain", ["", "rows", "columns"])
@pytest.mark.parametrize(
    ("n_out", "n_in", "rank"),
    [
        *((1, 1, 1), (1, 1, 0), (1, 64, 3), (5, 7, 2), (13, 63, 5), (7, 129, 64), (50, 65, 65)),
        *((300, 576, 16), (26, 1536, 200), (6, 8193, 1), (31, 12000, 4), (3, 300_000, 2)),
    ],
)
def test_sums_are_those_of_the_twin(isa: str, n_out: int, n_in: int, rank: int, gain: str) -> None:
    """Every shape, with tails of rows, columns and ranks, on each instruction set."""
    values, change = rows(n_out, n_in), change_of(n_out, n_in, rank, gain)
    rewriter = row_rewriter(LIB, GGMLType.F32, GGMLType.F32, n_in, change)
    actual = rewritten(rewriter, stored(values, GGMLType.F32)).view(np.float32)
    expected = changed(values, change)
    size = np.abs(values) * 2 + np.abs(change.left) @ np.abs(change.right)
    assert np.all(np.abs(actual.reshape(n_out, n_in) - expected) <= 2e-7 * (4 + rank**0.5) * size)


@pytest.mark.parametrize("type_", BOTH, ids=lambda type_: type_.name)
def test_bytes_are_those_of_ggml(type_: GGMLType) -> None:
    """What a type's rows become, changed or not, is what ggml's functions make of the values."""
    n_out, n_in = 24, 256
    source = stored(rows(n_out, n_in), type_)
    change = change_of(n_out, n_in, 3)
    for one in (None, change):
        as_f32 = row_rewriter(LIB, type_, GGMLType.F32, n_in, one)
        values = rewritten(as_f32, source).view(np.float32).reshape(n_out, n_in)
        if one is None:
            expected = np.empty((n_out, n_in), np.float32)
            to_f32(LIB, type_, source, expected)
            np.testing.assert_array_equal(values, expected)
        rewriter = row_rewriter(LIB, type_, type_, n_in, one)
        np.testing.assert_array_equal(rewritten(rewriter, source), stored(values, type_))


@pytest.mark.parametrize("n_in", [96, 576])
def test_pieces_of_rows_change_no_bit(isa: str, n_in: int) -> None:
    """A row's bits do not depend on the rows that are turned with it."""
    n_out = 400
    change = change_of(n_out, n_in, 70, "rows")
    rewriter = row_rewriter(LIB, GGMLType.Q8_0, GGMLType.F32, n_in, change)
    source = stored(rows(n_out, n_in), GGMLType.Q8_0)
    whole = rewritten(rewriter, source)
    row = rewriter.format.source_row
    for step in (1, 7, 64):
        parts = [
            rewritten(rewriter, source[start * row : (start + step) * row], start)
            for start in range(0, n_out, step)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65505.0, -1e30])
@pytest.mark.parametrize("place", [(0, 0), (299, 575), (150, 100)])
def test_values_that_cannot_be_stored_are_found(
    isa: str, value: float, place: tuple[int, int]
) -> None:
    """The rows that are handed back hold the value; nothing from them on is stored."""
    values = rows(300, 576)
    values[place] = value
    rewriter = row_rewriter(LIB, GGMLType.F32, GGMLType.F16, 576, change_of(300, 576, 4))
    out = np.full(300 * 576 * 2, 99, np.uint8)
    found = rewriter.run(0, stored(values, GGMLType.F32), out, rewriter.scratch())
    assert found is not None
    assert not np.all(np.abs(found) <= 65504)
    assert np.all(out[place[0] * 576 * 2 + place[1] * 2 :] == 99)


def test_large_values_within_the_bound_are_stored(isa: str) -> None:
    """Squares whose sum is beyond the bound's, or beyond F32, do not refuse what can be stored."""
    values = np.full((300, 64), 65504, np.float32)
    rewriter = row_rewriter(LIB, GGMLType.F32, GGMLType.F16, 64)
    data = rewritten(rewriter, stored(values, GGMLType.F32))
    assert np.all(data.view(np.float16) == 65504)
    values[:] = 3e38
    rewriter = row_rewriter(LIB, GGMLType.F32, GGMLType.BF16, 64)
    np.testing.assert_array_equal(
        rewritten(rewriter, stored(values, GGMLType.F32)), stored(values, GGMLType.BF16)
    )


def test_wrong_shapes_and_types_raise_before_the_call() -> None:
    """Types without values, rows that are no whole blocks, buffers and changes that do not fit."""
    for source, target in ((9, 0), (0, 9), (99, 0), (0, -1)):
        with pytest.raises(UnsupportedError):
            row_rewriter(LIB, source, target, 256)
    with pytest.raises(UnsupportedError, match="rows of 100 values"):
        row_rewriter(LIB, GGMLType.F32, GGMLType.Q8_0, 100)
    change = change_of(8, 64, 4)
    with pytest.raises(ValueError, match="rows of 96"):
        row_rewriter(LIB, GGMLType.F32, GGMLType.F32, 96, change)
    rewriter = row_rewriter(LIB, GGMLType.F32, GGMLType.F16, 64, change)
    scratch = rewriter.scratch()
    for n_source, n_stored, first, room in (
        *((255, 128, 0, scratch), (256, 127, 0, scratch), (256, 128, 0, scratch[1:])),
        *((256, 128, 8, scratch), (256, 128, -1, scratch), (512, 256, 7, scratch)),
    ):
        with pytest.raises(ValueError, match="expected"):
            rewriter.run(first, np.zeros(n_source, "u1"), np.zeros(n_stored, "u1"), room)


@pytest.mark.parametrize(
    ("left", "right", "gain"),
    [
        (np.zeros((4, 2)), np.zeros((2, 8), np.float32), None),
        (np.zeros((4, 2), np.float32), np.zeros((8, 2), np.float32).T, None),
        (np.zeros((4, 3), np.float32), np.zeros((2, 8), np.float32), None),
        (np.zeros((4, 2), np.float32), np.zeros((2, 8), np.float32), np.zeros(4, np.float32)),
        (np.zeros((4, 2), np.float32), np.zeros((2, 8), np.float32), np.zeros((1, 4), np.float32)),
    ],
)
def test_changes_that_c_could_not_read_are_refused(
    left: Floats, right: Floats, gain: Floats | None
) -> None:
    """Other numbers than F32, scattered memory, unlike ranks, gains of no row and no column."""
    with pytest.raises(ValueError, match="expected"):
        RowChange(left, right, gain)
