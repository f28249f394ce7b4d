"""The stacked lowering's own: slots, widening of the stacks, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.errors import CapacityError
from loragraph.ggml.handles import F16, F32
from loragraph.graph.lowrank.stacked import StackedLowering
from loragraph.graph.lowrank.stacks import StackedSlots
from tests.numerics.compare import nmse
from tests.numerics.runs import MIXING, open_context, random_tokens, run
from tests.tiny import TinyAdapter, TinyLlama

TOKENS = random_tokens(9)


class Setting:
    """A model and adapters by name."""

    def __init__(self, folder: Path) -> None:
        self.tiny = TinyLlama()
        self.folder = folder
        self.model = Model.load(self.tiny.write(folder / "m.gguf"), n_threads=1)
        self.a = self.load("a", TinyAdapter(seed=1))
        self.b = self.load("b", TinyAdapter(seed=2))
        self.wide = self.load("wide", TinyAdapter(seed=3, rank=40))
        self.table = self.load("table", TinyAdapter(seed=4, embeddings=True))
        self.table_2 = self.load("table_2", TinyAdapter(seed=5, embeddings=True, targets=()))

    def load(self, name: str, adapter: TinyAdapter) -> Adapter:
        """Writes and registers one more adapter."""
        path = self.folder / f"{name}.gguf"
        adapter.write(path, self.tiny)
        return self.model.load_adapter(path)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Shared by all tests of this module."""
    made = Setting(tmp_path_factory.mktemp("stacked"))
    with made.model:
        yield made


@pytest.fixture
def context(setting: Setting) -> Iterator[Context]:
    """A context of the stacked lowering."""
    with open_context(setting.model, lowering="stacked") as made:
        yield made


def lowering_of(context: Context) -> StackedLowering:
    """The context's lowering."""
    assert isinstance(context._lowering, StackedLowering)
    return context._lowering


def slots_of(context: Context) -> StackedSlots:
    """Who sits where."""
    return lowering_of(context)._resident


def test_adapters_come_and_go_without_a_rebuild(context: Context, setting: Setting) -> None:
    """Adapters no wider than those before share stacks and graph, and give the same bits again."""
    first = run(context, TOKENS, {setting.a: 1.0})
    for scales in ({setting.b: 0.5}, {setting.b: -1.0}, {setting.a: 1.0}):
        again = run(context, TOKENS, scales)
    assert np.array_equal(again, first)
    assert lowering_of(context).n_rebuilds == 1
    assert context.counters.n_graphs_built == 1


def test_stacks_widen_and_stay_wide(context: Context, setting: Setting) -> None:
    """A wider rank, more adapters or a new target rebuild the stacks once, not when they leave."""
    for n_rebuilds, scales in enumerate(
        [{setting.a: 1.0}, {setting.wide: 1.0}, {setting.a: 1.0, setting.b: 1.0}], start=1
    ):
        run(context, TOKENS, scales)
        assert lowering_of(context).n_rebuilds == n_rebuilds
    run(context, TOKENS, {setting.table: 1.0})
    assert lowering_of(context).n_rebuilds == 4
    nbytes = lowering_of(context).nbytes
    for adapter in (setting.a, setting.wide, setting.table, setting.table_2):
        run(context, TOKENS, {adapter: 1.0})
    assert (lowering_of(context).n_rebuilds, lowering_of(context).nbytes) == (4, nbytes)


def test_who_stays_keeps_its_slot(context: Context, setting: Setting) -> None:
    """Others come and leave around it; no slot is 0 or given twice, tables neither."""
    lowering, slots = lowering_of(context), slots_of(context)
    lowering.hold([setting.table, setting.table_2, setting.wide])
    slot = slots.slots[setting.table_2]
    table = slots.tables[slot]
    for others in ([setting.a], [setting.table, setting.b], [setting.wide, setting.a], []):
        lowering.hold([*others, setting.table_2])
        assert slots.slots.keys() == {*others, setting.table_2}
        assert (slots.slots[setting.table_2], slots.tables[slot]) == (slot, table)
        assert 0 not in slots.slots.values()
        assert len(set(slots.slots.values())) == len(slots.slots)
        assert len(set(slots.tables.values())) == len(slots.tables)
    assert slots.n_rebuilds == 1


def test_an_old_table_leaves_nothing_behind(context: Context, setting: Setting) -> None:
    """A slot, and a place of the token table, that another adapter had gives its new one's bits."""
    expected = {
        adapter: run(context, TOKENS, {adapter: 1.0})
        for adapter in (setting.wide, setting.table, setting.table_2)
    }
    for adapter in (setting.table, setting.wide, setting.table_2, setting.a, setting.table):
        logits = run(context, TOKENS, {adapter: 1.0})
        if adapter in expected:  # before, the stacks were narrower
            assert np.abs(logits - expected[adapter]).max() <= 1e-5 * np.abs(logits).max()
    first = run(context, TOKENS, {setting.table_2: 1.0})
    run(context, TOKENS, {setting.table: 1.0})
    assert np.array_equal(run(context, TOKENS, {setting.table_2: 1.0}), first)


def test_width_is_the_widest_mix_rounded_up(context: Context, setting: Setting) -> None:
    """One, two and four places a token: three adapters use the graph of four."""
    mixes = [
        {setting.a: 1.0},
        {setting.a: 1.0, setting.b: 1.0},
        {setting.a: 1.0, setting.b: 1.0, setting.wide: 1.0},
        {setting.a: 1.0, setting.b: 1.0, setting.wide: 1.0, setting.table: 1.0},
    ]
    for scales in mixes[::-1]:  # the widest stacks first
        run(context, TOKENS, scales)
    built = context.counters.n_graphs_built
    assert built == 3
    for scales in mixes:
        run(context, TOKENS, scales)
    assert context.counters.n_graphs_built == built


@pytest.mark.parametrize(
    ("type_a", "types"),
    [(F16, ["F16", "F16"]), (F32, ["F16", "F32"]), (F32, ["BF16"]), (F32, ["Q8_0", "F16"])],
)
def test_stacks_lose_nothing(type_a: int, types: list[str], tmp_path: Path) -> None:
    """A is F16 where every adapter's is, else F32, and holds exactly the adapters' values."""
    tiny = TinyLlama()
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        adapters = []
        for i, name in enumerate(types):
            dtype = GGMLQuantizationType[name]
            TinyAdapter(seed=i, rank=32, dtype=dtype, targets=("attn_q", "attn_v")).write(
                tmp_path / f"{i}.gguf", tiny
            )
            adapters.append(model.load_adapter(tmp_path / f"{i}.gguf"))
        with open_context(model, lowering="stacked") as context:
            lowering_of(context).hold(adapters)
            slots = slots_of(context)
            for name, stack in slots.stacks.targets.items():
                assert (stack.a.type, stack.b.type) == (type_a, F32)
                for adapter, slot in slots.slots.items():
                    pair = adapter.pairs[name]
                    rank = pair.rank
                    assert np.array_equal(stack.a_values[slot, :rank], adapter.array(pair.a))
                    b = adapter.array(pair.b) * np.float32(pair.scale)
                    assert np.array_equal(stack.b_values[slot, :, :rank], b)
                    assert not stack.a_values[slot, rank:].any()
                assert not stack.a_values[0].any()
                assert not stack.b_values[0].any()


def test_nine_adapters_a_token(setting: Setting) -> None:
    """Nine adapters of unlike ranks and scales on one token agree with the routed lowering."""
    extra = [
        setting.load(f"extra{i}", TinyAdapter(seed=10 + i, rank=1 + 3 * i, output=i == 2))
        for i in range(5)
    ]
    named = [setting.a, setting.b, setting.wide, setting.table, *extra]
    scales = {adapter: (-1) ** i / (2 + i) for i, adapter in enumerate(named)}
    results = []
    for lowering in MIXING:
        with open_context(setting.model, lowering=lowering) as context:
            results.append(run(context, TOKENS, scales))
    assert nmse(results[1], results[0]) <= 2e-12


def test_too_many_adapters_are_refused(setting: Setting) -> None:
    """More than the slots, or more in a mix than a token has places: CapacityError, nothing else
    changes."""
    model = setting.model
    lowering = StackedLowering(
        model.lib, model.weights.by_name, 8, tied=model.base_info.tied, n_slots=2, max_mix=2
    )
    three = [setting.a, setting.b, setting.wide]
    lowering.hold(three[:2])
    with pytest.raises(CapacityError, match="at most 2 adapters at once, got 3"):
        lowering.hold(three)
    with pytest.raises(CapacityError, match="at most 2 adapters a token, got 3"):
        lowering.check(Mix(dict.fromkeys(three, 1.0)))
    assert lowering._resident.slots.keys() == set(three[:2])
    lowering.close()
