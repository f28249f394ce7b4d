"""`builder.linear_id`: products with chosen experts, their scales, and adapters on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import BaseInfo, BaseTarget, TargetKind
from loragraph.adapters.gguf import read_adapter
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.errors import AdapterMismatchError, BackendError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import (
    F32,
    I32,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
)
from loragraph.ggml.lib import load_library
from loragraph.graph.batch import Batch
from loragraph.graph.builder import Builder
from loragraph.graph.lowrank.base import Lowering
from loragraph.graph.lowrank.branch import BranchLowering
from loragraph.graph.lowrank.resident import PreparedAdapters, Resident
from loragraph.graph.lowrank.routed import RoutedLowering
from loragraph.graph.lowrank.stacked import StackedLowering
from loragraph.graph.stretches import Stretches
from loragraph.model.weights import Use, Weight
from tests.tiny import write_adapter_raw

UP, GATE = "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.weight"
N_IN, N_OUT, N_EXPERT = 8, 6, 4
RANKS = (3, 5)
RNG = np.random.default_rng(11)
W = {name: RNG.standard_normal((N_EXPERT, N_OUT, N_IN)).astype(np.float32) for name in (UP, GATE)}
SCALES = RNG.uniform(0.5, 2, N_EXPERT).astype(np.float32)
ALPHA = 6.0
PAIRS = [
    {
        name: (
            RNG.standard_normal((N_EXPERT, rank, N_IN)).astype(np.float32),
            RNG.standard_normal((N_EXPERT, N_OUT, rank)).astype(np.float32),
        )
        for name in names
    }
    for rank, names in zip(RANKS, ((UP, GATE), (UP,)), strict=True)
]
METADATA: dict[str, Any] = {
    "general.type": "adapter",
    "general.architecture": "llama",
    "adapter.type": "lora",
    "adapter.lora.alpha": ALPHA,
}

Scales = tuple[float, float]  # of the two adapters


@dataclass(frozen=True)
class Case:
    """`ids` (n, n_used) names each token's experts; `x` (n, 1 or n_used, n_in)."""

    ids: NDArray[np.int32]
    x: NDArray[np.float32]
    scales: Sequence[Scales]  # each token's mix

    def alone(self, token: int) -> Case:
        """One token of it."""
        one = slice(token, token + 1)
        return Case(self.ids[one], self.x[one], self.scales[one])


def case(n: int, n_used: int, scales: Sequence[Scales], *, wide: bool) -> Case:
    """Random experts, no expert twice for one token; the tokens' mixes in turn."""
    ids = np.stack([RNG.permutation(N_EXPERT)[:n_used] for _ in range(n)]).astype(np.int32)
    x = RNG.standard_normal((n, n_used if wide else 1, N_IN)).astype(np.float32)
    return Case(ids, x, [scales[t % len(scales)] for t in range(n)])


def expected(one: Case, name: str, *, scaled: bool) -> NDArray[np.float64]:
    """(n, n_used, n_out) in float64: w_s belongs to the base product alone."""
    n, n_used = one.ids.shape
    y = np.zeros((n, n_used, N_OUT))
    for t, u in np.ndindex(n, n_used):
        expert = one.ids[t, u]
        x = one.x[t, u % one.x.shape[1]].astype(np.float64)
        y[t, u] = W[name][expert].astype(np.float64) @ x * (SCALES[expert] if scaled else 1)
        for pairs, rank, scale in zip(PAIRS, RANKS, one.scales[t], strict=True):
            if name in pairs:
                a, b = (half[expert].astype(np.float64) for half in pairs[name])
                y[t, u] += scale * ALPHA / rank * (b @ (a @ x))
    return y


class Bench:
    """Two expert stacks, two adapters on disk, and graphs of two `linear_id` in a lowering."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.lib = load_library()
        self.stack = stack
        targets = {
            name: BaseTarget(name, (N_IN, N_OUT, N_EXPERT, 1), TargetKind.EXPERTS) for name in W
        }
        base = BaseInfo("llama", "experts", targets, tied=False)
        self.adapters: list[Adapter] = []
        for i, pairs in enumerate(PAIRS):
            path = folder / f"{i}.gguf"
            write_adapter_raw(path, METADATA, halves(pairs))
            self.adapters.append(read_adapter(self.lib, path, base))
        ctx = stack.enter_context(TensorContext(self.lib, 4))
        self.scale = ctx.new_tensor(F32, (N_EXPERT,), "scale")
        tensors = {name: ctx.new_tensor(F32, (N_IN, N_OUT, N_EXPERT), name) for name in W}
        stack.enter_context(Buffer.for_tensors(ctx))
        array_view(self.lib, self.scale)[:] = SCALES
        for name, values in W.items():
            array_view(self.lib, tensors[name])[:] = values.ravel()
        self.folder = folder
        self.weights = {
            name: self._weight(name, tensor, scaled=False) for name, tensor in tensors.items()
        }

    def _weight(self, name: str, tensor: Tensor, *, scaled: bool) -> Weight:
        info = TensorInfo(name, F32, (N_IN, N_OUT, N_EXPERT, 1), 0, W[UP].nbytes, self.folder)
        factor = Weight("scale", self.scale, info, Use.VECTOR) if scaled else None
        return Weight(name, tensor, info, Use.EXPERTS, None, factor)

    def lowering(self, name: str, n_batch: int = 16) -> Lowering:
        one: Lowering
        if name == "branch":
            one = BranchLowering(self.lib, tied=False, registered=lambda: 0)
        elif name == "stacked":
            one = StackedLowering(self.lib, self.weights, n_batch, tied=False, n_slots=3, max_mix=2)
        else:
            resident = Resident(self.weights, PreparedAdapters(tied=False), 3)
            one = RoutedLowering(self.weights, resident, n_batch, max_mix=2)
        self.stack.callback(one.close)
        return one

    def batch(self, one: Case) -> Batch:
        mixes = [
            Mix({a: s for a, s in zip(self.adapters, scales, strict=True) if s}) or EMPTY_MIX
            for scales in one.scales
        ]
        distinct = tuple(dict.fromkeys(mixes))
        indices = np.arange(len(mixes), dtype=np.int32)
        return Batch(
            indices,
            indices,
            indices.astype(np.int64),
            np.array([distinct.index(mix) for mix in mixes], np.int32),
            distinct,
            indices,
            Stretches.of_one(0, len(mixes)),
        )

    def run(
        self, one: Case, lowering: Lowering, *, scaled: bool = False, n_threads: int = 1
    ) -> list[NDArray[Any]]:
        """Products with both stacks, (n, n_used, n_out) each."""
        n, n_used = one.ids.shape
        batch = self.batch(one)
        everyone = Mix(dict.fromkeys(self.adapters, 1.0))
        lowering.attach(batch.mixes[0] if lowering.name == "branch" else everyone)
        lib = self.lib
        with (
            TensorContext(lib, 2) as inputs,
            TensorContext(lib, 128, 128) as ctx,
            CpuBackend(lib, n_threads) as backend,
            GraphAllocator(lib) as allocator,
        ):
            x = inputs.new_tensor(F32, (N_IN, one.x.shape[1], n), "x")
            ids = inputs.new_tensor(I32, (n_used, n), "ids")
            with Buffer.for_tensors(inputs):
                for tensor, values in ((x, one.x), (ids, one.ids)):
                    array_view(lib, tensor)[:] = values.ravel()
                graph = lib.c.ggml_new_graph_custom(ctx.ptr, 128, False)
                nothing = cast(Any, None)  # no attention and no tokens in this graph
                low_rank = lowering.begin(batch)
                builder = Builder(
                    *(ctx, graph, low_rank, nothing),
                    tokens=nothing,
                    positions=nothing,
                    out_ids=nothing,
                )
                ys = [
                    builder.linear_id(self._weight(name, w.tensor, scaled=scaled), x, ids)
                    for name, w in self.weights.items()
                ]
                for y in ys:
                    lib.c.ggml_set_output(y.ptr)
                allocator.allocate(graph)
                low_rank.bind()
                lowering.write(batch)
                backend.compute(graph)
                return [array_view(lib, y).reshape(n, n_used, N_OUT).copy() for y in ys]


def halves(pairs: dict[str, tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Both tensors of every pair by their names in a file."""
    return {
        f"{name}.lora_{half}": values
        for name, pair in pairs.items()
        for half, values in zip("ab", pair, strict=True)
    }


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield Bench(stack, tmp_path)


SHAPES = [(1, 2, False), (5, 2, False), (3, 2, True), (7, 4, True)]


@pytest.mark.parametrize("name", ["branch", "routed", "stacked"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "w_s"])
@pytest.mark.parametrize("scales", [(0.0, 0.0), (1.0, 0.0), (0.0, 2.0), (0.5, -1.0)])
@pytest.mark.parametrize(("n", "n_used", "wide"), SHAPES)
def test_experts_are_routed_in_base_and_adapters(
    bench: Bench, name: str, scaled: bool, scales: Scales, n: int, n_used: int, wide: bool
) -> None:
    """Base, A and B use each token's own experts; the experts' scales act on the base alone."""
    one = case(n, n_used, [scales], wide=wide)

    results = bench.run(one, bench.lowering(name), scaled=scaled)

    for weight, result in zip(bench.weights, results, strict=True):
        twin = expected(one, weight, scaled=scaled)
        assert np.allclose(result, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["routed", "stacked"])
@pytest.mark.parametrize(("n", "n_used", "wide"), SHAPES)
def test_tokens_with_unlike_mixes_share_a_batch(
    bench: Bench, name: str, n: int, n_used: int, wide: bool
) -> None:
    """A token's products in a mixed batch are those of its adapters, and of it alone to the bit."""
    one = case(n, n_used, [(1.0, 0.0), (0.0, 0.0), (0.5, 2.0), (0.0, -1.0)], wide=wide)
    lowering = bench.lowering(name)

    results = bench.run(one, lowering)

    for weight, result in zip(bench.weights, results, strict=True):
        assert np.allclose(result, expected(one, weight, scaled=False), rtol=1e-5, atol=1e-5)
    for token in range(n):
        alone = bench.run(one.alone(token), lowering)
        for single, result in zip(alone, results, strict=True):
            np.testing.assert_array_equal(single[0], result[token])


def test_threads_change_no_bit(bench: Bench) -> None:
    """The nodes that route, shrink and expand wait for each other: two threads give one's bits."""
    one = case(16, 3, [(1.0, 0.0), (0.5, 2.0)], wide=True)
    lowering = bench.lowering("routed")
    expected = bench.run(one, lowering)
    for _ in range(10):
        for result, other in zip(bench.run(one, lowering, n_threads=2), expected, strict=True):
            np.testing.assert_array_equal(result, other)


@pytest.mark.parametrize("name", ["routed", "stacked"])
def test_base_tokens_are_untouched_beside_adapters(bench: Bench, name: str) -> None:
    """A token without adapters gets the bits of the base, whatever its neighbours carry."""
    one = case(6, 2, [(0.0, 0.0), (1.0, 1.0)], wide=False)
    base = Case(one.ids, one.x, [(0.0, 0.0)] * 6)

    mixed = bench.run(one, bench.lowering(name))

    for plain, result in zip(bench.run(base, bench.lowering(name)), mixed, strict=True):
        np.testing.assert_array_equal(plain[::2], result[::2])
        assert not np.array_equal(plain[1::2], result[1::2])


@pytest.mark.parametrize("n_expert", [1, 2, 5])
def test_another_number_of_experts_is_refused(tmp_path: Path, n_expert: int) -> None:
    """An adapter with fewer or more matrices than the base has experts does not load."""
    target = BaseTarget(UP, (N_IN, N_OUT, N_EXPERT, 1), TargetKind.EXPERTS)
    base = BaseInfo("llama", "experts", {UP: target}, tied=False)
    pair = np.ones((n_expert, 3, N_IN), np.float32), np.ones((n_expert, N_OUT, 3), np.float32)
    path = write_adapter_raw(tmp_path / "a.gguf", METADATA, halves({UP: pair}))

    with pytest.raises(AdapterMismatchError, match="expected 4 matrices"):
        read_adapter(load_library(), path, base)


def test_rows_that_are_neither_shared_nor_one_an_expert_are_refused(bench: Bench) -> None:
    """The routed lowering knows two layouts of x, and says so of a third."""
    one = Case(np.array([[0, 1, 2, 3]], np.int32), np.ones((1, 2, N_IN), np.float32), [(1.0, 0.0)])

    with pytest.raises(BackendError, match="1 or 4 rows a token"):
        bench.run(one, bench.lowering("routed"))
