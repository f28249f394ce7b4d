"""SmolLM2-135M-Instruct with the demo's adapters: against libllama, and against PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.model import Model
from tests.numerics.compare import greedy_agreement, nmse
from tests.numerics.runs import (
    EXACT,
    FLASH,
    LOWERINGS,
    Logits,
    Scales,
    libllama_logits,
    loragraph_logits,
    open_context,
    run,
    same_base,
)
from tests.oracle.libllama import Libllama
from tests.reference.merge import merge
from tests.smollm import smollm_path

ROOT = Path(__file__).parents[2]
ABOUT: dict[str, Any] = json.loads((ROOT / "demos/golden/demo.json").read_text())
ADAPTERS = {name: ROOT / path for name, path in ABOUT["adapters"].items()}
CASES: dict[str, dict[str, float]] = {case["name"]: case["mix"] for case in ABOUT["cases"]}
PROMPTS: list[list[int]] = [prompt["ids"] for prompt in ABOUT["prompts"]]

# The bound, for routed; the adapters are F16, and branch rounds activations to F16 as
# libllama does (measured: up to 8e-9 in both), so it is judged by libllama's error.
EXACT_NMSE = 1e-9
NO_WORSE = 1.5
EXACT_CASES = ("json", "pirate_poem")  # of six: the F32 base takes its time
N_GREEDY = 12


@pytest.mark.parametrize("name", ["base", "pirate", "pirate_poem"])
def test_the_q4_1_base_is_as_near_to_peft_as_libllama(name: str) -> None:
    """With the file's own Q4_1 weights: libllama's bits in branch with no or one adapter, and an
    error against PEFT, on the dequantised base, of at most 1.5 times libllama's in any lowering."""
    paths = [ADAPTERS[adapter] for adapter in CASES[name]]
    scales: Scales = tuple(CASES[name].values())
    tokens, base = PROMPTS[0], smollm_path()
    expected = libllama_logits(base, paths, [scales], tokens, FLASH, n_threads=2)[scales]
    for lowering in LOWERINGS:
        actual = loragraph_logits(
            base, paths, [scales], tokens, FLASH, lowering=lowering, n_threads=2
        )[scales]
        same_order = lowering == "branch" and len(scales) < 2
        # The head is Q8_0, and nothing follows it whose rounding could flip.
        head = 0 if same_base(lowering, "Q8_0") else 1e-12
        bound = 0 if same_order else 1e-2 if scales else head
        assert nmse(actual, expected) <= bound
        ours, theirs = (_golden_errors([rows], name)[0] for rows in (actual, expected))
        assert ours <= NO_WORSE * theirs, lowering


@pytest.fixture(scope="module")
def base_f32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The base in F32: 0.6 GB, taken away afterwards."""
    path = merge(smollm_path(), [], tmp_path_factory.mktemp("smollm") / "f32.gguf")
    yield path
    path.unlink()


@pytest.mark.slow
def test_exact_mode_is_peft(base_f32: Path) -> None:
    """One adapter and two on an F32 base: PEFT's logits, and PEFT's greedy ids."""
    libllama = _libllama_errors(base_f32)
    with Model.load(base_f32) as model:
        loaded = {name: model.load_adapter(path) for name, path in ADAPTERS.items()}
        for lowering in LOWERINGS:
            with open_context(model, EXACT, lowering=lowering, n_threads=2) as context:
                for name in EXACT_CASES:
                    mix = CASES[name]
                    scales = {loaded[adapter]: scale for adapter, scale in mix.items()}
                    rows = [run(context, prompt, scales) for prompt in PROMPTS]
                    for ours, theirs in zip(
                        _golden_errors(rows, name), libllama[name], strict=True
                    ):
                        rounds = lowering != "routed" and mix  # ggml rounds x to A's F16
                        assert ours <= (NO_WORSE * theirs if rounds else EXACT_NMSE), name
        _check_greedy(model, {loaded["pirate"]: 1.0, loaded["poem"]: 0.4}, "pirate_poem")


def _golden_errors(rows: list[Logits], name: str) -> list[float]:
    """NMSE of the columns that the golden file keeps, for each prompt."""
    with np.load(ROOT / "demos/golden/demo.npz") as arrays:
        columns = arrays["subset"]
        return [nmse(one[:, columns], arrays[f"{name}.logits{i}"]) for i, one in enumerate(rows)]


def _libllama_errors(base: Path) -> dict[str, list[float]]:
    out = {}
    with Libllama(base, n_ctx=256, kv_type="f32", n_threads=2) as oracle:
        handles = {name: oracle.load_adapter(path) for name, path in ADAPTERS.items()}
        for name in EXACT_CASES:
            oracle.set_adapters({handles[adapter]: s for adapter, s in CASES[name].items()})
            out[name] = _golden_errors([oracle.logits(prompt) for prompt in PROMPTS], name)
    return out


def _check_greedy(model: Model, scales: dict[Adapter, float], name: str) -> None:
    """PEFT's greedy ids, up to the first whose gap is within the logit bound."""
    with (
        np.load(ROOT / "demos/golden/demo.npz") as arrays,
        open_context(model, EXACT, n_threads=2) as context,
    ):
        expected, gaps = arrays[f"{name}.greedy0"][:N_GREEDY], arrays[f"{name}.gap0"][:N_GREEDY]
        row, actual = run(context, PROMPTS[0], scales)[-1], []
        for _ in expected:
            actual.append(int(row.argmax()))
            row = context.decode(actual[-1:])[0]
        pairs = np.stack([gaps, np.zeros_like(gaps)], axis=1)
        outcome = greedy_agreement(actual, expected.tolist(), pairs, bound=1e-3)
        assert outcome.agrees
        assert outcome.n_compared > 8
