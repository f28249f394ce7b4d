"""The native low-rank kernels against the float64 twin, and bit for bit against themselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.errors import BackendError, CapacityError, UnsupportedError
from loragraph.kernels import library
from loragraph.kernels.lowrank import (
    ExpandNode,
    Group,
    LoraPair,
    LowrankStep,
    ShrinkNode,
    TargetPairs,
    dispatch,
    forced_dispatch,
    function_address,
    instruction_sets,
    row_bytes,
    run_nodes,
    transpose_b,
)
from loragraph.kernels.pairs import BF16, F16, F32, Q8_0
from tests.kernels.cases import Entry, Table, nmse, random_pair, run_native, store
from tests.reference.lowrank import add_low_rank

TYPES = [F32, F16, BF16, Q8_0]
# Weights are read exactly and sums are in f32, so no bound depends on the storage type.
BOUND = 1e-12


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_dispatch(request.param):
        yield request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rows(rng: np.random.Generator, n_rows: int, n: int) -> NDArray[np.float32]:
    return rng.standard_normal((n_rows, n), np.float32)


def check(
    tables: list[Table],
    x: NDArray[np.float32],
    ys: list[NDArray[np.float32]],
    entries: list[Entry],
    n_threads: int = 1,
) -> None:
    got = run_native(tables, x, ys, entries, n_threads)
    for table, y, out in zip(tables, ys, got, strict=True):
        twin = add_low_rank(y.astype(np.float64), x.astype(np.float64), table.plain, entries)
        assert nmse(out, twin) <= BOUND


@pytest.mark.parametrize(("a_type", "b_type"), list(product(TYPES, TYPES)))
def test_every_pair_of_types(isa: str, rng: np.random.Generator, a_type: int, b_type: int) -> None:
    """Each storage type of lora_a works with each of lora_b, alone and in tiles."""
    table = Table.random(rng, 96, 208, [32, 64], (a_type, b_type))
    entries = [(0, row, 1.0) for row in range(7)] + [(1, 8, -0.5)]
    check([table], rows(rng, 9, 96), [rows(rng, 9, 208)], entries, 2)


@pytest.mark.parametrize("a_type", [F32, F16, BF16])
@pytest.mark.parametrize("n_in", [1, 15, 67])
@pytest.mark.parametrize("n_out", [1, 17, 133])
def test_odd_sizes_and_mixed_ranks(
    isa: str, rng: np.random.Generator, a_type: int, n_in: int, n_out: int
) -> None:
    """Sizes that no vector width divides, and adapters of unlike ranks in one step."""
    ranks = [1, 3, 8, 16, 33, 64]
    table = Table.random(rng, n_in, n_out, ranks, (a_type, a_type))
    entries = [(slot, row, 0.5 + slot) for slot in range(6) for row in range(slot, 6)]
    check([table], rows(rng, 6, n_in), [rows(rng, 6, n_out)], entries, 3)


def test_q8_0_lora_b_with_odd_n_out(isa: str, rng: np.random.Generator) -> None:
    """Q8_0 blocks run along the rank, so n_out needs no multiple of 32."""
    table = Table.random(rng, 32, 77, [32, 96], (Q8_0, Q8_0))
    entries = [(0, 0, 1.0), (1, 0, 1.0), (1, 1, 2.0)]
    check([table], rows(rng, 2, 32), [rows(rng, 2, 77)], entries)


def test_targets_that_share_a_shrink(isa: str, rng: np.random.Generator) -> None:
    """Three targets of unlike n_out, types and ranks read one x; untouched ones keep y."""
    tables = [
        Table.random(rng, 80, 80, [4, 0, 16], (F16, F16)),
        Table.random(rng, 80, 24, [4, 8, 0], (F32, BF16)),
        Table.random(rng, 80, 31, [0, 8, 5], (BF16, F16)),
    ]
    x, ys = rows(rng, 5, 80), [rows(rng, 5, n) for n in (80, 24, 31)]
    entries = [(2, 0, 1.0), (2, 4, 0.5), (0, 1, 1.0), (0, 4, -2.0), (1, 0, 1.0), (1, 3, 0.0)]
    check(tables, x, ys, entries, 2)
    untouched = run_native(tables, x, ys, [(1, 3, 1.0)])[0]
    np.testing.assert_array_equal(untouched, ys[0])


def test_zero_scale_keeps_y(isa: str, rng: np.random.Generator) -> None:
    """Scale 0 adds zeros: y stays as it is, bit for bit."""
    table = Table.random(rng, 64, 64, [8], (F16, F16))
    y = rows(rng, 3, 64)
    out = run_native([table], rows(rng, 3, 64), [y], [(0, row, 0.0) for row in range(3)])[0]
    np.testing.assert_array_equal(out, y)


def test_empty_step_writes_nothing(isa: str, rng: np.random.Generator) -> None:
    """A step without groups returns before it reads anything."""
    table = Table.random(rng, 16, 16, [4], (F32, F32))
    y = rows(rng, 2, 16)
    np.testing.assert_array_equal(run_native([table], rows(rng, 2, 16), [y], [])[0], y)


@pytest.mark.parametrize("a_type", TYPES)
def test_token_table_is_looked_up(isa: str, rng: np.random.Generator, a_type: int) -> None:
    """Gather takes the row of lora_a that a one-hot x would select."""
    rank = 64 if a_type == Q8_0 else 37
    table = Table.random(rng, 50, 90, [rank, 0], (a_type, F16), token_table=True)
    tokens = np.array([3, 49, 0, 3, 17], np.int32)
    entries = [(0, 0, 1.0), (0, 1, 0.5), (0, 3, -1.0), (0, 4, 2.0), (1, 2, 1.0)]
    y = rows(rng, 5, 90)
    out = run_native([table], tokens, [y], entries, 2)[0]
    one_hot = np.eye(50)[tokens]
    assert nmse(out, add_low_rank(y.astype(np.float64), one_hot, table.plain, entries)) <= BOUND


def test_unknown_token_is_visible(isa: str, rng: np.random.Generator) -> None:
    """A token outside the table reads no foreign memory and makes its row NaN."""
    table = Table.random(rng, 8, 16, [4], (F32, F32), token_table=True)
    tokens = np.array([8, -1, 7], np.int32)
    entries: list[Entry] = [(0, row, 1.0) for row in range(3)]
    out = run_native([table], tokens, [rows(rng, 3, 16)], entries)[0]
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2]).all()


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (BF16, BF16), (Q8_0, Q8_0)])
def test_row_alone_equals_row_in_a_step(
    isa: str, rng: np.random.Generator, types: tuple[int, int]
) -> None:
    """Bits of a row do not depend on other rows, other groups or the number of threads."""
    n_in, n_out, n_rows = (96, 133, 37)
    ranks = [32, 64, 32] if types[0] == Q8_0 else [3, 16, 33]
    table = Table.random(rng, n_in, n_out, ranks, types)
    x, y = rows(rng, n_rows, n_in), rows(rng, n_rows, n_out)
    members = [range(37), range(0, 37, 5), range(3, 37, 2)]
    entries = [(slot, row, 0.3 + row) for slot in range(3) for row in members[slot]]
    whole = run_native([table], x, [y], entries)[0]
    for n_threads in (2, 3, 16):
        np.testing.assert_array_equal(run_native([table], x, [y], entries, n_threads)[0], whole)
    for row in (0, 3, 5, 15, 36):
        alone = [entry for entry in entries if entry[1] == row]
        out = run_native([table], x, [y], alone)[0]
        np.testing.assert_array_equal(out[row], whole[row])


@pytest.mark.parametrize("skew", [False, True])
def test_many_adapters_of_a_row_each(isa: str, rng: np.random.Generator, skew: bool) -> None:
    """Whether threads share out rows or columns, every row gets the bits that it gets alone."""
    ranks = [1, 3, 8, 16, 33, 64, 0, 5, 16, 16, 8, 4, 300 if skew else 9]
    table = Table.random(rng, 67, 77, ranks, (F16, F16))
    order = rng.permutation(len(ranks))
    entries = [(slot, int(order[slot]), 1.0 + slot) for slot in range(len(ranks))]
    entries += [(2, int(order[5]), -1.0), (12, int(order[0]), 0.5)]
    entries.sort()
    x, y = rows(rng, len(ranks), 67), rows(rng, len(ranks), 77)
    check([table], x, [y], entries, 3)
    whole = run_native([table], x, [y], entries)[0]
    for n_threads in (2, 3, 5):
        np.testing.assert_array_equal(run_native([table], x, [y], entries, n_threads)[0], whole)
    for row in range(len(ranks)):
        alone = [entry for entry in entries if entry[1] == row]
        np.testing.assert_array_equal(run_native([table], x, [y], alone)[0][row], whole[row])


def test_many_adapters_on_one_row(isa: str, rng: np.random.Generator) -> None:
    """A single row with many adapters is still shared out, and summed in order."""
    table = Table.random(rng, 40, 48, [4] * 12, (F32, F32))
    entries: list[Entry] = [(slot, 0, 1.0) for slot in range(12)]
    x, y = rows(rng, 1, 40), rows(rng, 1, 48)
    check([table], x, [y], entries, 2)
    np.testing.assert_array_equal(
        run_native([table], x, [y], entries, 3)[0], run_native([table], x, [y], entries)[0]
    )


def test_wide_target_in_column_blocks(isa: str, rng: np.random.Generator) -> None:
    """A row wider than the block of sums is added in full, with unlike ranks behind each other."""
    table = Table.random(rng, 16, 4500, [5, 8], (F16, F16))
    entries = [(0, 0, 1.0), (1, 0, 1.0), (1, 1, 2.0)]
    check([table], rows(rng, 2, 16), [rows(rng, 2, 4500)], entries, 2)


def test_shared_shrink_equals_own_shrink(isa: str, rng: np.random.Generator) -> None:
    """Targets that share a shrink node get the bits that they would get alone."""
    tables = [Table.random(rng, 70, n, [5, 16], (F16, F16)) for n in (70, 20, 33)]
    x, ys = rows(rng, 6, 70), [rows(rng, 6, n) for n in (70, 20, 33)]
    entries = [(1, row, 1.5) for row in range(6)] + [(0, 2, 1.0)]
    shared = run_native(tables, x, ys, entries, 2)
    for table, y, out in zip(tables, ys, shared, strict=True):
        np.testing.assert_array_equal(run_native([table], x, [y], entries)[0], out)


def test_special_values_convert_alike(rng: np.random.Generator) -> None:
    """Every finite F16 and BF16 value reads the same in every instruction set, bit for bit."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    for a_type, exponent in ((F16, 0x7C00), (BF16, 0x7F80)):
        finite = bits[(bits & exponent) != exponent]
        table = TargetPairs(finite.size, 1, 1, token_table=True)
        one = transpose_b(np.ones((1, 1), np.float32), F32, 1, 1)
        table.set_pair(0, LoraPair(finite, a_type, one, F32, 1, 1.0))
        tokens = np.arange(finite.size, dtype=np.int32)
        entries: list[Entry] = [(0, row, 1.0) for row in range(finite.size)]
        expected = finite.view(np.float16).astype(np.float32)
        if a_type == BF16:
            expected = (finite.astype(np.uint32) << 16).view(np.float32)
        for name in instruction_sets():
            with forced_dispatch(name):
                zeros = np.zeros((finite.size, 1), np.float32)
                out = run_native([Table(table, [None])], tokens, [zeros], entries)[0]
            np.testing.assert_array_equal(out[:, 0], expected)


def test_instruction_sets_agree(rng: np.random.Generator) -> None:
    """Every instruction set of this CPU computes the same up to the rounding of sums."""
    table = Table.random(rng, 200, 100, [16, 5], (F16, BF16))
    x, y = rows(rng, 9, 200), rows(rng, 9, 100)
    entries = [(0, row, 1.0) for row in range(9)] + [(1, 4, 2.0)]
    results = {}
    for name in instruction_sets():
        with forced_dispatch(name):
            assert dispatch() == name
            results[name] = run_native([table], x, [y], entries)[0]
    for result in results.values():
        assert nmse(result, results["portable"].astype(np.float64)) <= BOUND


def test_best_instruction_set_is_the_default() -> None:
    """Without force the last of the supported sets is in use, also after a forced one."""
    with forced_dispatch("portable"):
        pass
    assert dispatch() == instruction_sets()[-1]
    with pytest.raises(BackendError, match="expected one of"), forced_dispatch("mmx"):
        pass


def test_scratch_too_small_is_visible(isa: str, rng: np.random.Generator) -> None:
    """Nothing is written outside a scratch that was not reserved: the rows become NaN."""
    table = Table.random(rng, 16, 20, [4], (F32, F32))
    step = LowrankStep(2, 1, 3)
    step.write([Group(0, [0, 1], [1.0, 1.0])])
    x, y = rows(rng, 2, 16), rows(rng, 2, 20)
    shrink = ShrinkNode(step, [table.native])
    shrink.bind(x.ctypes.data, 16)
    expand = ExpandNode(shrink)
    expand.bind(y.ctypes.data, 20)
    run_nodes([shrink, expand], 2)
    assert np.isnan(y).all()


def test_pairs_change_between_steps(rng: np.random.Generator) -> None:
    """A slot that is set again or cleared takes effect at the same addresses."""
    table = Table.random(rng, 16, 16, [4], (F32, F32))
    x, y = rows(rng, 1, 16), rows(rng, 1, 16)
    before = run_native([table], x, [y], [(0, 0, 1.0)])[0]
    pair, table.plain[0] = random_pair(rng, 16, 16, 9, (F16, F16))
    table.native.set_pair(0, pair)
    assert not np.array_equal(run_native([table], x, [y], [(0, 0, 1.0)])[0], before)
    check([table], x, [y], [(0, 0, 1.0)])
    table.native.clear(0)
    np.testing.assert_array_equal(run_native([table], x, [y], [(0, 0, 1.0)])[0], y)


def test_unaligned_memory(isa: str, rng: np.random.Generator) -> None:
    """Weights may begin at any byte."""
    n_in, n_out, rank = 48, 40, 6
    a_data, a = store(rng.standard_normal((rank, n_in), np.float32), F16)
    shifted = np.zeros(a_data.nbytes + 1, np.uint8)
    shifted[1:] = a_data.view(np.uint8).ravel()
    pair, twin = random_pair(rng, n_in, n_out, rank, (F16, F16))
    table = TargetPairs(n_in, n_out, 1)
    table.set_pair(0, LoraPair(shifted[1:], F16, pair.b, F16, rank, pair.scale))
    plain = type(twin)(a, twin.b, twin.scale)
    check([Table(table, [plain])], rows(rng, 1, n_in), [rows(rng, 1, n_out)], [(0, 0, 1.0)])


@pytest.mark.parametrize("ggml_type", TYPES)
def test_transpose_b_is_exact(rng: np.random.Generator, ggml_type: int) -> None:
    """Transposed lora_b holds the same numbers, bit for bit."""
    data, b = store(rng.standard_normal((10, 64), np.float32), ggml_type)
    out = transpose_b(data, ggml_type, 64, 10)
    if ggml_type == Q8_0:
        assert out.scales is not None
        values = out.values.view(np.int8).reshape(64, 10) * np.repeat(
            out.scales[0].astype(np.float32), 32, axis=0
        )
    elif ggml_type == BF16:
        values = (out.values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = out.values.view(np.float16 if ggml_type == F16 else np.float32)
    np.testing.assert_array_equal(values.reshape(64, 10).T.astype(np.float64), b)


def test_wrong_sizes_are_refused() -> None:
    """Memory of another size never reaches a kernel."""
    table = TargetPairs(16, 8, 2)
    b = transpose_b(np.zeros((8, 4), np.float32), F32, 4, 8)
    with pytest.raises(ValueError, match="lora_a: expected 256 bytes, got 128"):
        table.set_pair(0, LoraPair(np.zeros((4, 8), np.float32), F32, b, F32, 4, 1.0))
    with pytest.raises(ValueError, match="transposed lora_b: expected 64 bytes, got 128"):
        table.set_pair(0, LoraPair(np.zeros((4, 16), np.float32), F32, b, F16, 4, 1.0))
    with pytest.raises(ValueError, match=r"slot: expected \[0, 2\), got 2"):
        table.set_pair(2, LoraPair(np.zeros((4, 16), np.float32), F32, b, F32, 4, 1.0))
    with pytest.raises(ValueError, match="rank: expected at least 1"):
        table.set_pair(0, LoraPair(np.zeros((0, 16), np.float32), F32, b, F32, 0, 1.0))
    with pytest.raises(ValueError, match="contiguous"):
        transpose_b(np.zeros((4, 8), np.float32).T, F32, 4, 8)


def test_nodes_refuse_targets_that_do_not_fit() -> None:
    """Targets of one shrink share n_in; a token table has its own node; an index is in range."""
    step = LowrankStep(1, 1, 1)
    with pytest.raises(ValueError, match="n_in 16"):
        ShrinkNode(step, [TargetPairs(16, 8, 1), TargetPairs(8, 8, 1)])
    with pytest.raises(ValueError, match="target: expected"):
        ExpandNode(ShrinkNode(step, [TargetPairs(16, 8, 1)]), 1)


def test_unsupported_types_are_named() -> None:
    """A quantised adapter of another type and a broken Q8_0 row are the user's errors."""
    with pytest.raises(UnsupportedError, match="got ggml type 12"):
        row_bytes(256, 12)
    with pytest.raises(UnsupportedError, match="multiple of 32 values, got 33"):
        row_bytes(33, Q8_0)


def test_step_refuses_what_does_not_fit() -> None:
    """A step larger than its arrays is refused, one that just fits is taken."""
    step = LowrankStep(4, 1, 1)
    step.write([Group(0, [0, 1, 2, 3], [1.0] * 4)])
    assert step.n_entries == 4
    with pytest.raises(CapacityError, match="at most 1 groups of 4 entries"):
        step.write([Group(0, [0], [1.0]), Group(1, [0], [1.0])])


def test_flat_arrays_are_groups(rng: np.random.Generator) -> None:
    """write_csr takes what write makes of groups; pointers that miss entries are refused."""
    table = Table.random(rng, 16, 8, [4, 4], (F32, F32))
    x, ys = rows(rng, 3, 16), [np.zeros((3, 8), np.float32) for _ in range(2)]
    step = LowrankStep(3, 2, 4)
    shrink = ShrinkNode(step, [table.native])
    shrink.bind(x.ctypes.data, 16)
    expand = ExpandNode(shrink)
    step.write([Group(1, [0, 2], [1.0, 2.0]), Group(0, [2], [3.0])])
    expand.bind(ys[0].ctypes.data, 8)
    run_nodes([shrink, expand])
    step.write_csr(
        np.array([1, 0]), np.array([0, 2, 3]), np.array([0, 2, 2]), np.array([1.0, 2.0, 3.0])
    )
    expand.bind(ys[1].ctypes.data, 8)
    run_nodes([shrink, expand])
    np.testing.assert_array_equal(ys[0], ys[1])
    assert ys[0][2].any()
    with pytest.raises(ValueError, match="ptr: expected 0 to 3, got 0 to 2"):
        step.write_csr([1, 0], [0, 1, 2], [0, 2, 2], [1.0, 2.0, 3.0])


def test_missing_build_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiled module cannot be imported, a BackendError says so."""
    monkeypatch.setitem(sys.modules, "loragraph.kernels._kernels", None)
    spec = importlib.util.spec_from_file_location("library_again", library.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(BackendError, match="compiled module"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_nodes_share_no_function() -> None:
    """The three kernels have addresses of their own, as a custom node needs them."""
    names = ("loragraph_lowrank_shrink", "loragraph_lowrank_expand", "loragraph_lowrank_gather")
    assert len({function_address(name) for name in names} - {0}) == 3
