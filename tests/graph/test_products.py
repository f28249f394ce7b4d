"""Which weights our product kernel takes, and that a graph with it gives ggml's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from loragraph import Context, Model
from loragraph.graph import products
from loragraph.kernels.library import forced_dispatch
from loragraph.kernels.product import Layout, min_rows
from tests.reference.llama import ReferenceLlama
from tests.tiny import TinyLlama

TOKENS = list(range(1, 12))
LAYOUTS = {"Q4_0": Layout.Q4_0X8, "Q4_1": Layout.Q4_1, "Q8_0": Layout.Q8_0, "F16": Layout.F16}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one type; its name tells which."""
    path = tmp_path_factory.mktemp("products") / f"{request.param}.gguf"
    return TinyLlama(weight_type=GGMLQuantizationType[request.param]).write(path)


def layouts(model: Model) -> dict[str, Layout]:
    """What the kernel would multiply."""
    return products.product_layouts(model.weights.by_name.values(), model.weights.files)


def test_layouts(base: Path) -> None:
    """All linear weights of Q4_0, repacked, of plain Q8_0 and of F16, and no token table."""
    layout = LAYOUTS[base.stem]
    with Model.load(base) as model:
        found = layouts(model)
        linear = {name for name in model.weights.by_name if "norm" not in name}
    expected = linear - {"token_embd.weight"} if min_rows(layout) else set()
    assert found == dict.fromkeys(expected, layout)


def test_without_a_kernel_all_is_ggmls(base: Path) -> None:
    """An instruction set without products leaves them to ggml."""
    with forced_dispatch("portable"), Model.load(base) as model:
        assert layouts(model) == {}


def test_a_graph_without_a_kernel_is_ggmls(base: Path) -> None:
    """Weights sorted under one instruction set, the graph built under one without products."""
    logits, n_nodes = [], []
    with Model.load(base) as model, forced_dispatch("portable"):
        for lowering in ("branch", "routed"):
            with Context(model, n_ctx=64, lowering=lowering) as context:
                logits.append(context.decode(TOKENS))
                n_nodes.append(context.counters.n_nodes)

    assert np.array_equal(logits[0], logits[1])
    assert n_nodes[0] == n_nodes[1]


def test_plain_q4_0_is_ggmls(tmp_path: Path) -> None:
    """Without repacking there is no interleaved Q4_0."""
    path = TinyLlama(weight_type=GGMLQuantizationType.Q4_0).write(tmp_path / "m.gguf")
    with Model.load(path, repack=False) as model:
        assert layouts(model) == {}


def test_another_interleaving_is_ggmls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory does not hold what the file and the layout say, the kernel is not used."""
    path = TinyLlama(weight_type=GGMLQuantizationType.Q4_0).write(tmp_path / "m.gguf")
    own = products.interleaved
    monkeypatch.setattr(products, "interleaved", lambda rows: own(rows)[::-1])
    with Model.load(path) as model:
        assert layouts(model) == {}


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 11])
def test_ggmls_numbers(base: Path, n_tokens: int) -> None:
    """Q4_0 has ggml's bits; sums of Q8_0 and Q4_1 have another order; F16 leaves x as it is, so is
    closer.
    """
    with Model.load(base) as model:
        logits = {}
        for lowering in ("branch", "routed"):
            with Context(model, n_ctx=64, lowering=lowering) as context:
                logits[lowering] = context.decode(TOKENS[:n_tokens])
                nodes = context.counters.n_nodes
            logits[f"{lowering} nodes"] = np.array(nodes)
    ours, ggmls = logits["routed"], logits["branch"]

    f16 = base.stem == "F16"
    least = min_rows(LAYOUTS[base.stem])
    used = 0 < least <= n_tokens
    if base.stem != "Q4_0" and used:
        # A rounding of x to 8 bits may flip; four bits of w leave it more to change.
        bound = {"F16": 0.02, "Q8_0": 0.05, "Q4_1": 0.15}[base.stem]
        assert 0 < np.abs(ours - ggmls).max() < bound
        if f16:
            exact = ReferenceLlama.load(base).logits(TOKENS[:n_tokens])
            assert np.square(ours - exact).sum() < np.square(ggmls - exact).sum()
    else:
        assert np.array_equal(ours, ggmls)
    assert (logits["routed nodes"] > logits["branch nodes"]) == (used and not f16)


def test_unlike_layouts_of_one_x(tmp_path: Path) -> None:
    """Weights of unlike types that read the same x each get it in the form that they multiply."""
    types = {"attn_k": GGMLQuantizationType.Q8_0, "attn_v": GGMLQuantizationType.F16}
    tiny = TinyLlama(weight_type=GGMLQuantizationType.Q4_0, types=types)
    with Model.load(tiny.write(tmp_path / "m.gguf")) as model:
        logits = []
        for lowering in ("branch", "routed"):
            with Context(model, n_ctx=64, lowering=lowering) as context:
                logits.append(context.decode(TOKENS))

    # Roundings of x to 8 bits flip, and F16 leaves x as it is; a wrong form gives noise.
    assert np.square(logits[0] - logits[1]).sum() < 1e-3 * np.square(logits[0]).sum()
