"""Experts in the native low-rank kernels: the route node, and products per (adapter, expert)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loragraph.kernels.lowrank import (
    ExpandNode,
    ExpertStep,
    LoraPair,
    LowrankStep,
    RouteNode,
    ShrinkNode,
    TargetPairs,
    forced_dispatch,
    instruction_sets,
    run_nodes,
    transpose_b,
)
from loragraph.kernels.pairs import BF16, F16, F32, Q8_0
from tests.kernels.cases import Entry, GuardedRows, grouped, nmse, store
from tests.reference.lowrank import Pair, add_low_rank_experts

TYPES = [F32, F16, BF16, Q8_0]
BOUND = 1e-12


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_dispatch(request.param):
        yield request.param


class Stacks:
    """Random pairs of one target of experts, native and plain; rank 0: target untouched."""

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: tuple[int, int, int],
        ranks: list[int],
        types: tuple[int, int],
    ) -> None:
        self.n_in, self.n_out, self.n_expert = n_in, n_out, n_expert = sizes
        self.native = TargetPairs(n_in, n_out, len(ranks), n_expert=n_expert)
        self.plain: list[list[Pair] | None] = []
        for slot, rank in enumerate(ranks):
            if rank == 0:
                self.plain.append(None)
                continue
            a_data, a = store(rng.standard_normal((n_expert, rank, n_in), np.float32), types[0])
            b_data, b = store(rng.standard_normal((n_expert, n_out, rank), np.float32), types[1])
            scale = float(np.float32(rng.uniform(0.25, 4.0)))
            turned = transpose_b(b_data, types[1], rank, n_out, n_expert)
            self.native.set_pair(slot, LoraPair(a_data, types[0], turned, types[1], rank, scale))
            self.plain.append([Pair(a[e], b[e], scale) for e in range(n_expert)])


class Experts:
    """A step: x (n_tokens, 1 or n_used, n_in), ids (n_tokens, n_used), y of each target."""

    def __init__(
        self, rng: np.random.Generator, targets: list[Stacks], n: int, n_used: int, wide: bool
    ) -> None:
        self.targets = targets
        n_expert = targets[0].n_expert
        # A view with rows wider than n_used, as the graph's top-k gives.
        self.ids = np.stack([rng.permutation(n_expert) for _ in range(n)]).astype(np.int32)
        self.n_used = n_used
        x_shape = (n, n_used if wide else 1, targets[0].n_in)
        self.x = rng.standard_normal(x_shape, np.float32)
        self.y = [rng.standard_normal((n * n_used, one.n_out), np.float32) for one in targets]

    def run(self, entries: list[Entry], n_threads: int = 1) -> list[NDArray[np.float32]]:
        """y of every target, (n * n_used, n_out)."""
        step = LowrankStep(max(len(entries), 1), 16, 0)
        step.write(grouped(entries))
        routed = ExpertStep(self.targets[0].n_expert)
        route = RouteNode(step.struct, routed, self.n_used)
        route.bind(self.ids.ctypes.data, self.ids.shape[1])
        by_token = self.x.shape[1] == 1
        shrink = ShrinkNode(routed, [one.native for one in self.targets], x_by_token=by_token)
        shrink.bind(self.x.ctypes.data, self.x.shape[2])
        routed.fit(step.n_entries * self.n_used, shrink.floats_per_entry)
        guarded = [GuardedRows(y) for y in self.y]
        expands = [ExpandNode(shrink, i) for i in range(len(guarded))]
        for expand, rows in zip(expands, guarded, strict=True):
            expand.bind(rows.address, rows.stride)
        run_nodes([route, shrink, *expands], n_threads)
        assert all(rows.guards_hold() for rows in guarded)
        return [rows.values.copy() for rows in guarded]

    def check(self, entries: list[Entry], n_threads: int = 1) -> None:
        """Compares with the twin in float64."""
        for one, y, out in zip(self.targets, self.y, self.run(entries, n_threads), strict=True):
            twin = add_low_rank_experts(
                y.astype(np.float64),
                self.x.astype(np.float64),
                self.ids[:, : self.n_used],
                one.plain,
                entries,
            )
            assert nmse(out, twin) <= BOUND


@pytest.mark.parametrize(("a_type", "b_type"), list(product(TYPES, TYPES)))
def test_every_pair_of_types(isa: str, a_type: int, b_type: int) -> None:
    """Each storage type of lora_a works with each of lora_b, expert behind expert."""
    rng = np.random.default_rng(1)
    stacks = Stacks(rng, (64, 49, 5), [32, 64], (a_type, b_type))
    entries: list[Entry] = [(0, row, 1.0) for row in range(6)] + [(1, row, -0.5) for row in (2, 7)]
    Experts(rng, [stacks], 8, 3, wide=False).check(entries, 2)


@pytest.mark.parametrize("wide", [False, True], ids=["x a token", "x an expert"])
@pytest.mark.parametrize("n_in", [1, 15, 67])
@pytest.mark.parametrize("n_out", [1, 17, 133])
def test_odd_sizes_and_mixed_ranks(isa: str, n_in: int, n_out: int, wide: bool) -> None:
    """Sizes that no vector width divides, several adapters a token, unlike ranks in one step."""
    rng = np.random.default_rng(2)
    stacks = Stacks(rng, (n_in, n_out, 3), [1, 3, 0, 16, 33], (F16, F32))
    entries: list[Entry] = [(slot, row, 0.5 + slot) for slot in range(5) for row in range(slot, 6)]
    Experts(rng, [stacks], 6, 2, wide).check(entries, 3)


def test_targets_that_share_x_and_experts(isa: str) -> None:
    """Gate and up read one x in one shrink node; a target that no adapter touches keeps y."""
    rng = np.random.default_rng(3)
    targets = [
        Stacks(rng, (40, 24, 4), [4, 0, 7], (F16, F16)),
        Stacks(rng, (40, 31, 4), [0, 8, 5], (F32, BF16)),
    ]
    step = Experts(rng, targets, 5, 2, wide=False)
    step.check([(2, 0, 1.0), (2, 4, 0.5), (0, 1, 1.0), (1, 0, 1.0), (1, 3, 0.0)], 2)
    np.testing.assert_array_equal(step.run([(1, 3, 1.0)])[0], step.y[0])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_step(data: st.DataObject) -> None:
    """Random shapes, mixes, types and threads, by any instruction set: the twin's numbers."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n_expert = data.draw(st.integers(1, 9))
    n_used = data.draw(st.integers(1, n_expert))
    n_slots, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    types = (data.draw(st.sampled_from([F32, F16, BF16])), data.draw(st.sampled_from([F32, F16])))
    sizes = (data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70)), n_expert)
    ranks = [data.draw(st.integers(0, 20)) for _ in range(n_slots)]
    pairs = [(slot, row) for slot in range(n_slots) for row in range(n)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30))
    entries = [(slot, row, float(rng.uniform(-2, 2))) for slot, row in sorted(chosen)]
    step = Experts(rng, [Stacks(rng, sizes, ranks, types)], n, n_used, data.draw(st.booleans()))
    with forced_dispatch(data.draw(st.sampled_from(instruction_sets()))):
        step.check(entries, data.draw(st.integers(1, 4)))


def test_threads_and_neighbours_change_no_bit(isa: str) -> None:
    """A row's result is the same for any number of threads, alone or beside other rows."""
    rng = np.random.default_rng(4)
    stacks = Stacks(rng, (33, 65, 6), [5, 8], (F16, F16))
    step = Experts(rng, [stacks], 9, 3, wide=True)
    entries: list[Entry] = [(0, row, 1.0) for row in range(9)] + [(1, row, 2.0) for row in (1, 8)]

    whole = step.run(entries)[0]

    for n_threads in (2, 5):
        np.testing.assert_array_equal(step.run(entries, n_threads)[0], whole)
    alone = step.run([entry for entry in entries if entry[1] == 8])[0]
    np.testing.assert_array_equal(alone[24:27], whole[24:27])
    np.testing.assert_array_equal(alone[:24], step.y[0][:24])


def test_one_group_for_each_adapter_and_expert() -> None:
    """Tokens are grouped by (adapter, expert), so that each matrix is read once a step."""
    rng = np.random.default_rng(5)
    ids = np.array([[2, 0], [0, 1], [2, 1]], np.int32)
    step = LowrankStep(8, 4, 0)
    step.write(grouped([(1, 0, 1.0), (1, 2, 0.5), (0, 1, 2.0)]))
    routed = ExpertStep(3)
    routed.fit(6, 1)
    route = RouteNode(step.struct, routed, 2)
    route.bind(ids.ctypes.data, 2)

    run_nodes([route], int(rng.integers(1, 4)))

    made = routed.struct
    assert (made.n_groups, made.n_entries) == (5, 6)
    slots = [1 * 3 + 0, 1 * 3 + 1, 1 * 3 + 2, 0 * 3 + 0, 0 * 3 + 1]
    assert [made.group_slot[i] for i in range(5)] == slots
    assert [made.group_ptr[i] for i in range(6)] == [0, 1, 2, 4, 5, 6]
    assert [made.entry_row[i] for i in range(6)] == [1, 5, 0, 4, 2, 3]
    assert [made.entry_token[i] for i in range(6)] == [0, 2, 0, 2, 1, 1]
    assert [made.entry_scale[i] for i in range(6)] == [1.0, 0.5, 1.0, 0.5, 2.0, 2.0]


def test_experts_that_do_not_exist_are_skipped() -> None:
    """An id outside the experts is nobody's, and no memory outside is touched."""
    rng = np.random.default_rng(6)
    step = Experts(rng, [Stacks(rng, (8, 8, 2), [4], (F32, F32))], 2, 2, wide=False)
    step.ids[0] = (-1, 2)

    out = step.run([(0, 0, 1.0), (0, 1, 1.0)])[0]

    np.testing.assert_array_equal(out[:2], step.y[0][:2])
    assert not np.array_equal(out[2:], step.y[0][2:])


def test_a_step_without_room_shows() -> None:
    """A step that was not fitted gives NaN, never silence and never a write out of bounds."""
    rng = np.random.default_rng(8)
    one = Stacks(rng, (8, 8, 2), [4], (F32, F32))
    case = Experts(rng, [one], 3, 2, wide=False)
    step = LowrankStep(8, 4, 0)
    step.write(grouped([(0, 0, 1.0), (0, 2, 1.0)]))
    routed = ExpertStep(2)
    route = RouteNode(step.struct, routed, 2)
    route.bind(case.ids.ctypes.data, 2)
    shrink = ShrinkNode(routed, [one.native], x_by_token=True)
    shrink.bind(case.x.ctypes.data, 8)
    rows = GuardedRows(case.y[0])
    expand = ExpandNode(shrink)
    expand.bind(rows.address, rows.stride)

    run_nodes([route, shrink, expand])

    assert np.isnan(rows.values[0]).all()
    assert rows.guards_hold()


def test_a_cleared_slot_forgets_every_expert() -> None:
    """After `clear` no expert of the slot applies any more, and the slot can be used again."""
    rng = np.random.default_rng(9)
    one = Stacks(rng, (8, 8, 3), [4, 4], (F32, F32))
    step = Experts(rng, [one], 3, 2, wide=False)
    entries: list[Entry] = [(slot, row, 1.0) for slot in range(2) for row in range(3)]
    one.native.clear(0)
    one.plain[0] = None

    step.check(entries)

    assert one.native.max_rank == 4


@pytest.mark.parametrize("what", ["a", "b"])
def test_stacks_of_another_size_are_refused(what: str) -> None:
    """Matrices for fewer experts than the target has: ValueError, the slot keeps its pair."""
    table = TargetPairs(4, 3, 1, n_expert=2)
    n_a, n_b = (1, 2) if what == "a" else (2, 1)
    a, b = np.zeros((n_a, 5, 4), np.float32), np.zeros((n_b, 3, 5), np.float32)
    turned = transpose_b(b, F32, 5, 3, n_b)

    with pytest.raises(ValueError, match=f"lora_{what}: expected"):
        table.set_pair(0, LoraPair(a, F32, turned, F32, 5, 1.0))
    assert table.max_rank == 0
