"""What each lowering builds, keeps and reuses, as the counters tell it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.engine.runner import MAX_GRAPHS, KeptGraph, Runner
from loragraph.ggml.handles import Tensor
from loragraph.ggml.ops import Ops
from loragraph.graph.lowrank.base import NODES_PER_PAIR_BUDGET
from tests.numerics.runs import LOWERINGS, LoweringName, open_context, random_tokens, run
from tests.tiny import TinyAdapter, TinyLlama

TOKENS = random_tokens(8)
N_PAIRS = 14  # seven weights in two layers


class Setting:
    """A model and three adapters of unlike ranks and targets."""

    def __init__(self, folder: Path) -> None:
        tiny = TinyLlama()
        self.model = Model.load(tiny.write(folder / "m.gguf"), n_threads=1)
        self.folder = folder
        self.tiny = tiny
        self.a = self.load("a", TinyAdapter(seed=1))
        self.b = self.load("b", TinyAdapter(rank=9, seed=2))
        self.c = self.load("c", TinyAdapter(targets=("attn_q",), layers=(1,), output=True, seed=3))

    def load(self, name: str, adapter: TinyAdapter) -> Adapter:
        """Writes and registers one more adapter."""
        path = self.folder / f"{name}.gguf"
        adapter.write(path, self.tiny)
        return self.model.load_adapter(path)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Shared by all tests of this module."""
    return Setting(tmp_path_factory.mktemp("counters"))


@pytest.fixture
def branch(setting: Setting) -> Iterator[Context]:
    """A context of the branch lowering."""
    with open_context(setting.model, lowering="branch") as context:
        yield context


@pytest.fixture
def routed(setting: Setting) -> Iterator[Context]:
    """A context of the routed lowering."""
    with open_context(setting.model, lowering="routed") as context:
        yield context


def test_branch_uses_four_nodes_a_pair(branch: Context, setting: Setting) -> None:
    """A-matmul, B-matmul, scale and add for each pair in use, whatever is registered."""
    branch.decode(TOKENS)
    base = branch.counters.n_nodes
    run(branch, TOKENS, {setting.a: 1.0})
    assert branch.counters.n_nodes == base + 4 * N_PAIRS
    run(branch, TOKENS, {setting.a: 1.0, setting.c: 1.0})
    assert branch.counters.n_nodes == base + 4 * (N_PAIRS + 2)


def test_branch_uses_four_nodes_for_the_token_table_and_the_tied_head(tmp_path: Path) -> None:
    """The table's pair takes four nodes at the lookup, and four more at a tied head."""
    tiny = TinyLlama(tied=True)
    TinyAdapter(embeddings=True, targets=()).write(tmp_path / "a.gguf", tiny)
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        lookup, both = (
            model.load_adapter(tmp_path / "a.gguf", tied_output=tied) for tied in (False, True)
        )
        with open_context(model, lowering="branch") as context:
            context.decode(TOKENS)
            base = context.counters.n_nodes
            run(context, TOKENS, {lookup: 1.0})
            assert context.counters.n_nodes == base + 4
            run(context, TOKENS, {both: 1.0})
            assert context.counters.n_nodes == base + 8


def test_branch_budgets_six_nodes_for_each_registered_pair(
    branch: Context, setting: Setting
) -> None:
    """The node budget of a new graph grows by six a pair with every adapter registered, used or
    not."""
    run(branch, TOKENS, {setting.a: 1.0})
    before = branch.counters.node_budget
    with setting.load("d", TinyAdapter(targets=("attn_v", "ffn_up"), seed=4)):
        run(branch, TOKENS, {setting.b: 1.0})
        assert branch.counters.node_budget == before + NODES_PER_PAIR_BUDGET * 4
    run(branch, TOKENS, {setting.a: 1.0})
    assert branch.counters.node_budget == before
    assert NODES_PER_PAIR_BUDGET == 6


def test_branch_reuses_the_graph_of_its_set(branch: Context, setting: Setting) -> None:
    """Same shape and same set: one graph, also after setting the same set again."""
    for _ in range(3):
        run(branch, TOKENS, {setting.a: 1.0, setting.b: 0.5})
    run(branch, TOKENS, {setting.b: 0.5, setting.a: 1.0, setting.c: 0.0})
    counters = branch.counters
    assert (counters.n_graphs_built, counters.n_graphs_reused) == (1, 3)
    assert counters.n_graphs_dropped == 0


def test_branch_rebuilds_when_the_set_changes(branch: Context, setting: Setting) -> None:
    """Another adapter, another scale, none: each change of the set drops the graphs."""
    sets: list[dict[Adapter, float]] = [
        {setting.a: 1.0},
        {setting.a: 0.5},
        {setting.b: 0.5},
        {setting.a: 0.5, setting.b: 0.5},
        {},
        {setting.a: 1.0},
    ]
    for index, scales in enumerate(sets, start=1):
        run(branch, TOKENS, scales)
        assert branch.counters.n_graphs_built == index
        assert branch.counters.n_graphs_dropped == index - 1
        assert branch.n_set_changes == index - 1


def test_setting_the_same_set_again_changes_nothing(branch: Context, setting: Setting) -> None:
    """Neither repeated sets nor zero scales count as a change."""
    for scales in ({setting.a: 1.0}, {setting.a: 1.0}, {setting.b: 0.0, setting.a: 1.0}):
        branch.set_adapters(scales)
    assert branch.n_set_changes == 0
    assert [adapter for adapter, _ in branch.mix] == [setting.a]
    assert setting.b.attached_to == ()


def test_routed_never_rebuilds_for_adapters(routed: Context, setting: Setting) -> None:
    """One graph with low-rank nodes serves any adapters, ranks and scales of its shape."""
    sets: list[dict[Adapter, float]] = [
        {setting.a: 1.0},
        {setting.b: -0.5},
        {setting.a: 0.5, setting.b: 2.0, setting.c: 1.0},
        {setting.c: 1.0},
    ]
    n_nodes = set()
    for scales in sets:
        run(routed, TOKENS, scales)
        n_nodes.add(routed.counters.n_nodes)
    assert routed.counters.n_graphs_built == 1
    assert routed.counters.n_graphs_reused == len(sets) - 1
    assert len(n_nodes) == 1


def test_routed_budgets_independently_of_what_is_registered(setting: Setting) -> None:
    """Neither nodes nor budget grow with the adapters registered or in use."""
    seen = set()
    for n in range(3):
        extra = [setting.load(f"extra{i}", TinyAdapter(seed=20 + i)) for i in range(n)]
        with open_context(setting.model, lowering="routed") as context:
            run(context, TOKENS, dict.fromkeys([setting.a, *extra], 0.5))
            seen.add((context.counters.n_nodes, context.counters.node_budget))
        for adapter in extra:
            adapter.close()
    assert len(seen) == 1


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_base_steps_have_no_low_rank_nodes(lowering: LoweringName, setting: Setting) -> None:
    """Without adapters a graph is the base's, before, between and after steps with adapters."""
    with open_context(setting.model, lowering=lowering) as context:
        context.decode(TOKENS)
        base = context.counters.n_nodes
        assert "CUSTOM" not in node_ops(context._runner)
        run(context, TOKENS, {setting.a: 1.0})
        assert context.counters.n_nodes > base
        run(context, TOKENS, {setting.a: 0.0})
        assert context.counters.n_nodes == base


def test_both_lowerings_share_the_base_graph(setting: Setting) -> None:
    """The base's graph has the same nodes in both."""
    ops = []
    for lowering in LOWERINGS:
        with open_context(setting.model, lowering=lowering) as context:
            context.decode(TOKENS)
            ops.append(node_ops(context._runner))
    assert ops[0] == ops[1]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_kept_graphs_are_bounded(lowering: LoweringName, setting: Setting) -> None:
    """More shapes than MAX_GRAPHS: the least recently used is dropped, and rebuilt when needed."""
    with open_context(setting.model, lowering=lowering) as context:
        context.set_adapters({setting.a: 1.0})
        tokens = random_tokens(MAX_GRAPHS + 4)
        expected = run(context, tokens[:1], {setting.a: 1.0})
        for n in range(1, MAX_GRAPHS + 5):
            context.clear()
            context.decode(tokens[:n])
            assert len(context._runner._graphs) <= MAX_GRAPHS
        assert context.counters.n_graphs_dropped == 4
        built = context.counters.n_graphs_built
        context.clear()
        assert np.array_equal(context.decode(tokens[:1]), expected)
        assert context.counters.n_graphs_built == built + 1


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_compute_memory_does_not_grow_with_shapes(lowering: LoweringName, setting: Setting) -> None:
    """All kept graphs share one compute buffer, sized at the start for the widest step."""
    with open_context(setting.model, lowering=lowering, n_batch=32) as context:
        before = context.nbytes
        for n in (32, 1, 7, 31):
            run(context, TOKENS * 4, {setting.a: 1.0, setting.b: 1.0}, chunk=n)
        assert context.nbytes["compute"] <= 1.5 * before["compute"]
        buffers = {_buffer(context._runner, graph.logits.ptr) for graph in graphs(context._runner)}
        assert len(buffers) == 1


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_growth_of_the_compute_buffer_drops_every_graph(
    lowering: LoweringName, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the buffer moves, graphs of the old addresses go, and results stay right."""
    with open_context(setting.model, lowering=lowering) as context:
        short = run(context, TOKENS[:2], {setting.a: 1.0})
        tokens = random_tokens(200)
        long = run(context, tokens, {setting.a: 1.0})
    monkeypatch.setattr(Runner, "_reserve", lambda self, n_batch: None)
    with open_context(setting.model, lowering=lowering) as context:
        assert np.array_equal(run(context, TOKENS[:2], {setting.a: 1.0}), short)
        small = context.nbytes["compute"]
        assert np.array_equal(run(context, tokens, {setting.a: 1.0}), long)
        assert context.nbytes["compute"] > small
        assert context.counters.n_graphs_dropped == 1
        assert np.array_equal(run(context, TOKENS[:2], {setting.a: 1.0}), short)
        assert np.array_equal(run(context, tokens, {setting.a: 1.0}), long)


def graphs(runner: Runner) -> list[KeptGraph]:
    """The kept graphs."""
    return list(runner._graphs.values())


def node_ops(runner: Runner) -> list[str]:
    """The operations of the graph used last, in order."""
    graph = next(reversed(runner._graphs.values()))
    c = runner._lib.c
    nodes = (c.ggml_graph_node(graph.graph, i) for i in range(graph.n_nodes))
    return [runner._lib.text(c.ggml_op_desc(node)) for node in nodes]


def _buffer(runner: Runner, tensor: Any) -> int:
    return runner._lib.address(tensor.buffer)


def test_branch_rounds_scales_as_llama_cpp_does(
    branch: Context, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """user scale · alpha / rank in f32, left to right; user scale · (alpha / rank) has other bits
    for a rank that is no power of two."""
    seen: set[float] = set()
    original = Ops.scale

    def spy(self: Ops, a: Tensor, factor: float) -> Tensor:
        seen.add(float(np.float32(factor)))  # as C receives it
        return original(self, a, factor)

    monkeypatch.setattr(Ops, "scale", spy)
    for user_scale in (0.1, 0.7, 1.3, -2.1):
        seen.clear()
        run(branch, TOKENS, {setting.b: user_scale})
        expected = np.float32(user_scale) * np.float32(8) / np.float32(9)
        assert seen == {float(expected)}
