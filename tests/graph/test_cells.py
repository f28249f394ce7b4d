"""Attention over cells in the graph: the same logits as the other attentions, from kept graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.adapters.mix import EMPTY_MIX
from loragraph.engine.assembly import AttentionName, make_runner
from loragraph.engine.model import Model
from loragraph.errors import ConfigError
from loragraph.graph.batch import Batch
from loragraph.graph.stretches import Stretches
from tests.numerics.compare import nmse
from tests.numerics.runs import LOWERINGS, LoweringName, open_context, random_tokens, run
from tests.smollm import smollm_path
from tests.tiny import TinyAdapter, TinyLlama

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"n_head_kv": 4},
    "mqa": {"n_head_kv": 1},
    "head_32": {"head_dim": 32},
    "head_80": {"head_dim": 80},
    "uneven": {"n_head": 6, "n_head_kv": 2, "n_embd": 96, "n_ff": 64},
}
TOKENS = random_tokens(90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model whose heads have 32 values."""
    path = tmp_path_factory.mktemp("cells") / "m.gguf"
    with Model.load(TinyLlama(head_dim=32).write(path), n_threads=1) as loaded:
        yield loaded


def logits(model: Model, attention: str, kv_type: str, **options: Any) -> NDArray[np.float32]:
    """Logits of TOKENS in chunks of 40."""
    with open_context(model, attention=attention, kv_type=kv_type, **options) as context:
        return run(context, TOKENS, {}, chunk=40)


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_cells_are_exact(shape: str, tmp_path: Path) -> None:
    """With F32 cells the logits are those of the exact mode, for every form of the heads."""
    path = TinyLlama(**SHAPES[shape]).write(tmp_path / "m.gguf")
    with Model.load(path, n_threads=1) as model:
        exact = logits(model, "plain", "f32")
        assert nmse(logits(model, "cells", "f32"), exact) <= 2e-12
        assert nmse(logits(model, "cells", "f32", n_threads=3), exact) <= 2e-12


def test_f16_cells_are_no_worse_than_flash(model: Model) -> None:
    """With F16 cells the error against the exact mode is at most that of flash attention."""
    exact = logits(model, "plain", "f32")
    assert nmse(logits(model, "cells", "f16"), exact) <= nmse(logits(model, "flash", "f16"), exact)


def test_q8_0_cells(model: Model) -> None:
    """Q8_0 cells take about half of F16's memory and keep the logits."""
    exact = logits(model, "plain", "f32")
    assert 0 < nmse(logits(model, "cells", "q8_0"), exact) <= 1e-3
    with (
        open_context(model, attention="cells", kv_type="q8_0") as small,
        open_context(model, attention="cells", kv_type="f16") as large,
    ):
        assert small.nbytes["cells"] <= 0.54 * large.nbytes["cells"]


def test_q8_0_needs_cells_and_whole_blocks(model: Model, tmp_path: Path) -> None:
    """Q8_0 with another attention, or with heads that are no whole blocks, is a ConfigError."""
    for attention in ("flash", "plain"):
        with pytest.raises(ConfigError, match="attention 'cells'"):
            open_context(model, attention=attention, kv_type="q8_0")
    path = TinyLlama(head_dim=16).write(tmp_path / "m.gguf")
    with (
        Model.load(path, n_threads=1) as other,
        pytest.raises(ConfigError, match="divisible by 32"),
    ):
        open_context(other, attention="cells", kv_type="q8_0")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_adapters_with_cells(lowering: LoweringName, tmp_path: Path) -> None:
    """Both lowerings run beside attention over cells."""
    tiny = TinyLlama(tied=True)
    TinyAdapter(embeddings=True).write(tmp_path / "a.gguf", tiny)
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        adapter = model.load_adapter(tmp_path / "a.gguf")
        out = []
        for attention in ("plain", "cells"):
            with open_context(
                model, attention=attention, kv_type="f32", lowering=lowering
            ) as context:
                out.append(run(context, TOKENS[:20], {adapter: 0.7}))
        assert nmse(out[1], out[0]) <= 2e-12


def test_one_graph_serves_any_number_of_cells(model: Model) -> None:
    """Decode steps share one graph across the 256 cells where flash attention builds another."""
    tokens = random_tokens(300)
    built = {}
    for attention in ("cells", "flash"):
        with open_context(model, n_ctx=512, attention=attention, kv_type="f16") as context:
            context.decode(tokens[:250])
            for token in tokens[250:270]:
                context.decode([token])
            built[attention] = context.counters.n_graphs_built
            assert context.counters.n_graphs_reused == 21 - context.counters.n_graphs_built
    assert built == {"cells": 2, "flash": 3}


def test_truncated_sequence_goes_on(model: Model) -> None:
    """After truncate the cells behind are not seen any more."""
    with open_context(model, attention="cells", kv_type="f16") as context:
        fresh = run(context, TOKENS[:30], {})
        run(context, [*TOKENS[:20], *TOKENS[40:80]], {})
        context.truncate(20)
        np.testing.assert_array_equal(context.decode(TOKENS[20:30]).shape, fresh[20:].shape)
        context.truncate(20)
        again = context.decode(TOKENS[20:30])
    assert nmse(again, fresh[20:]) <= 1e-6


# Three sequences share positions 0-4 in cells 300-304; then row 5 goes on in cell 9, rows 6 and 7
# in cells 500 and 40, row 8 in cell 3. Rows 0-4 are the shared positions.
RUNS = [[(300, 5)], [(9, 1)], [(500, 1), (40, 1)], [(3, 1)]]
VIEWS = [
    *[(0, 0, 5, 0, 5), (0, 5, 1, 5, 6), (0, 6, 2, 5, 7), (0, 8, 1, 5, 6)],
    *[(1, 5, 1, 5, 6), (2, 6, 2, 5, 7), (3, 8, 1, 5, 6)],
]


def mixed_step() -> Batch:
    """The rows above in one step."""
    positions = np.array([0, 1, 2, 3, 4, 5, 5, 6, 5], np.int32)
    cells = np.array([300, 301, 302, 303, 304, 9, 500, 40, 3], np.int64)
    none = np.zeros(9, np.int32)
    rows = np.arange(9, dtype=np.int32)
    stretches = Stretches.of_views(RUNS, [0, 5, 5, 5], VIEWS)
    tokens = np.array(TOKENS[:9], np.int32)
    return Batch(tokens, positions, cells, none, (EMPTY_MIX,), rows, stretches)


def step(model: Model, attention: AttentionName, batch: Batch) -> NDArray[np.float32]:
    """Logits of one step."""
    _, runner = make_runner(model, 512, 16, "routed", "f32", attention, 2)
    try:
        return runner.run(batch)
    finally:
        runner.close()


def test_sequences_that_share_cells(model: Model) -> None:
    """Rows of several sequences on shared and scattered cells get what the mask gives them."""
    batch = mixed_step()
    cells = step(model, "cells", batch)
    assert nmse(cells, step(model, "plain", batch)) <= 2e-12
    with open_context(model) as context:  # the second sequence alone
        alone = run(context, [*TOKENS[:5], *TOKENS[6:8]], {})
    assert nmse(cells[[0, 1, 2, 3, 4, 6, 7]], alone) <= 2e-12


def test_smollm2() -> None:
    """On a real model, logits are as near to the exact mode as flash attention's, chunk or step.

    Its Q4_1 weights round activations to 8 bits, so that any other rounding of a sum shows: the
    three modes differ by about 2e-3 from each other.
    """
    text = "The largest planet of the solar system is Jupiter, and the smallest one is Mercury."
    with Model.load(smollm_path(), n_threads=2) as model:
        ids = list(model.vocab.tokenize(text))
        exact, flash, cells = (
            _real_logits(model, ids, attention, kv_type)
            for attention, kv_type in (("plain", "f32"), ("flash", "f16"), ("cells", "f16"))
        )
    assert nmse(cells, exact) <= 2 * nmse(flash, exact)
    assert cells[-1].argmax() == exact[-1].argmax()


def _real_logits(model: Model, ids: list[int], attention: str, kv_type: str) -> NDArray[np.float32]:
    with open_context(model, n_threads=2, attention=attention, kv_type=kv_type) as context:
        prompt = run(context, ids[:-5], {})
        steps = [context.decode([token]) for token in ids[-5:]]
    return np.concatenate([prompt, *steps])
