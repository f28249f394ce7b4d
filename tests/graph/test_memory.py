"""Nothing of one step leaks into the next: neither compute memory nor inputs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.graph.lowrank.stacked import StackedLowering
from tests.numerics.runs import (
    LOWERINGS,
    MODES,
    Logits,
    LoweringName,
    open_context,
    random_tokens,
)
from tests.rss import resident_bytes
from tests.tiny import TinyAdapter, TinyLlama

TOKENS = random_tokens(60)
LENGTHS = (1, 9, 1, 1, 3, 20, 2, 1, 17, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with one adapter on everything."""
    folder = tmp_path_factory.mktemp("memory")
    tiny = TinyLlama()
    TinyAdapter(embeddings=True, output=True).write(folder / "a.gguf", tiny)
    with Model.load(tiny.write(folder / "m.gguf"), n_threads=1) as model:
        model.load_adapter(folder / "a.gguf")
        yield model


def steps(context: Context, adapter: Adapter, before: Any = None) -> list[Logits]:
    """Steps of changing lengths, each second one with the adapter; `before` runs before each."""
    out, start = [], 0
    for index, n in enumerate(LENGTHS):
        context.set_adapters({adapter: 1.0} if index % 2 else {})
        if before is not None:
            before(context)
        out.append(context.decode(TOKENS[start : start + n]))
        start += n
    return out


def fill(context: Context, handle: Any) -> None:
    """All bytes of a ggml buffer become 0xFF: NaN as a float, -1 as an index."""
    context._runner._lib.c.ggml_backend_buffer_clear(handle, 0xFF)


def poison_compute(context: Context) -> None:
    """Spoils the compute memory that all kept graphs share."""
    for graph in context._runner._graphs.values():
        fill(context, graph.logits.ptr.buffer)


def poison_inputs(context: Context) -> None:
    """Spoils every step input, those of the lowering too."""
    fill(context, context._runner._inputs._buffer.ptr)
    if isinstance(context._lowering, StackedLowering):
        fill(context, context._lowering._inputs._buffer.ptr)


@pytest.mark.parametrize("poison", [poison_compute, poison_inputs])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_poisoned_memory_changes_nothing(
    lowering: LoweringName, mode: str, poison: Any, model: Model
) -> None:
    """With compute memory or inputs spoiled before each step the bits stay the same: every step
    writes all that it reads."""
    (adapter,) = model.adapters
    with open_context(model, MODES[mode], lowering=lowering) as context:
        expected = steps(context, adapter)
    with open_context(model, MODES[mode], lowering=lowering) as context:
        actual = steps(context, adapter, poison)
        assert context.counters.n_graphs_reused > 0 or lowering == "branch"
    assert all(np.array_equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_the_poison_reaches_the_graph(model: Model) -> None:
    """The compute buffer that is poisoned is the one that logits are read from."""
    with open_context(model) as context:
        context.decode(TOKENS[:4])
        (graph,) = context._runner._graphs.values()
        poison_compute(context)
        ffi = context._runner._lib.ffi
        assert bytes(ffi.buffer(graph.logits.ptr.data, 64)) == b"\xff" * 64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_inputs_of_the_last_step_never_leak(
    lowering: LoweringName, mode: str, model: Model
) -> None:
    """Steps of alternating lengths over kept graphs give the bits of graphs built afresh."""
    (adapter,) = model.adapters
    with open_context(model, MODES[mode], lowering=lowering) as context:
        expected = steps(context, adapter, lambda context: context._runner.drop_graphs())
    with open_context(model, MODES[mode], lowering=lowering) as context:
        steps(context, adapter)
        context.clear()
        actual = steps(context, adapter)
    assert all(np.array_equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_memory_is_flat_over_many_graphs(lowering: LoweringName, model: Model) -> None:
    """Hundreds of shapes and set changes: what dropped graphs and sets held is free again."""
    (adapter,) = model.adapters

    def cycle(context: Context) -> None:
        for n in range(1, 31):
            context.clear()
            context.set_adapters({adapter: n / 8} if n % 3 else {})
            context.decode(TOKENS[:n])

    with open_context(model, lowering=lowering) as context:
        for _ in range(3):
            cycle(context)
        gc.collect()
        before = resident_bytes()
        for _ in range(6):
            cycle(context)
        gc.collect()
        assert context.counters.n_graphs_built > 100
    assert resident_bytes() - before < 8 << 20
