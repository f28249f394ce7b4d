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
    DEFAULT,
    EXACT,
    LOWERINGS,
    LoweringName,
    Mode,
    Scales,
    libllama_logits,
    loragraph_logits,
    open_context,
    run,
)
from tests.oracle.libllama import Libllama
from tests.reference.merge import merge
from tests.smollm import smollm_path

ROOT = Path(__file__).parents[2]
ABOUT: dict[str, Any] = json.loads((ROOT / "demos/golden/demo.json").read_text())
ADAPTERS = {name: ROOT / path for name, path in ABOUT["adapters"].items()}
CASES: dict[str, dict[str, float]] = {case["name"]: case["mix"] for case in ABOUT["cases"]}
PROMPTS: list[list[int]] = [prompt["ids"] for prompt in ABOUT["prompts"]]

EXACT_NMSE = 1e-9  # the bound
NO_WORSE = 1.5


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_q4_1_base_is_libllamas(lowering: LoweringName) -> None:
    """With the file's own Q4_1 weights and an F16 adapter: equal bits in branch; routed, which
    does not round activations to F16, within the bound of its types."""
    cases: list[Scales] = [(0,), (1,), (0.5,)]
    paths, tokens = [ADAPTERS["pirate"]], PROMPTS[0]
    expected = libllama_logits(smollm_path(), paths, cases, tokens, DEFAULT)
    actual = loragraph_logits(smollm_path(), paths, cases, tokens, DEFAULT, lowering=lowering)
    for scales in cases:
        same_order = lowering == "branch" or not any(scales)
        assert nmse(actual[scales], expected[scales]) <= (0 if same_order else 5e-4), scales


@pytest.fixture(scope="module")
def base_f32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The base in F32: 0.6 GB, taken away afterwards."""
    path = merge(smollm_path(), [], tmp_path_factory.mktemp("smollm") / "f32.gguf")
    yield path
    path.unlink()


@pytest.mark.slow
def test_exact_mode_is_peft_and_default_mode_no_worse_than_libllama(base_f32: Path) -> None:
    """Every case of the golden file: logits, greedy ids, and in default mode libllama's error."""
    with np.load(ROOT / "demos/golden/demo.npz") as arrays, Model.load(base_f32) as model:
        loaded = {name: model.load_adapter(path) for name, path in ADAPTERS.items()}
        libllama = _libllama_errors(base_f32, arrays)
        for name, mix in CASES.items():
            scales = {loaded[adapter]: scale for adapter, scale in mix.items()}
            for lowering in LOWERINGS:
                exact = _errors(model, scales, arrays, name, EXACT, lowering)
                assert max(exact) <= EXACT_NMSE, (name, lowering, exact)
                default = _errors(model, scales, arrays, name, DEFAULT, lowering)
                for ours, theirs in zip(default, libllama[name], strict=True):
                    assert ours <= NO_WORSE * theirs, (name, lowering)
            _check_greedy(model, scales, arrays, name)


def _errors(
    model: Model,
    scales: dict[Adapter, float],
    arrays: Any,
    name: str,
    mode: Mode,
    lowering: LoweringName,
) -> list[float]:
    with open_context(model, mode, lowering=lowering, n_threads=2) as context:
        rows = [run(context, prompt, scales) for prompt in PROMPTS]
    return _compared(rows, arrays, name)


def _compared(rows: list[Any], arrays: Any, name: str) -> list[float]:
    """NMSE of the columns that the golden file keeps, and of the last row, for each prompt."""
    columns = arrays["subset"]
    return [
        error
        for i, logits in enumerate(rows)
        for error in (
            nmse(logits[:, columns], arrays[f"{name}.logits{i}"]),
            nmse(logits[-1], arrays[f"{name}.last{i}"]),
        )
    ]


def _libllama_errors(base: Path, arrays: Any) -> dict[str, list[float]]:
    out = {}
    with Libllama(base, n_ctx=256, flash=True, n_threads=2) as oracle:
        handles = {name: oracle.load_adapter(path) for name, path in ADAPTERS.items()}
        for name, mix in CASES.items():
            oracle.set_adapters({handles[adapter]: scale for adapter, scale in mix.items()})
            out[name] = _compared([oracle.logits(prompt) for prompt in PROMPTS], arrays, name)
    return out


def _check_greedy(model: Model, scales: dict[Adapter, float], arrays: Any, name: str) -> None:
    """Exact mode: PEFT's greedy ids, up to the first whose gap is within the logit bound."""
    with open_context(model, EXACT, n_threads=2) as context:
        for i, prompt in enumerate(PROMPTS):
            expected, gaps = arrays[f"{name}.greedy{i}"], arrays[f"{name}.gap{i}"]
            row, actual = run(context, prompt, scales)[-1], []
            for _ in expected:
                actual.append(int(row.argmax()))
                row = context.decode(actual[-1:])[0]
            pairs = np.stack([gaps, np.zeros_like(gaps)], axis=1)
            outcome = greedy_agreement(actual, expected.tolist(), pairs, bound=1e-3)
            assert outcome.agrees, (name, i)
            assert outcome.n_compared > 8
