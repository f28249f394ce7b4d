"""SmolLM2-135M-Instruct with the demo's adapters: against libllama, and against PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from tests.numerics.compare import greedy_agreement, nmse
from tests.numerics.runs import (
    EXACT,
    LOWERINGS,
    MODES,
    Logits,
    LoweringName,
    Mode,
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

# For routed (measured: at most 3.5e-12; the issue asks for 1e-9). The adapters are F16, and the
# others round activations to F16 as libllama does (up to 8e-9), so libllama's error judges them.
EXACT_NMSE = 2e-11
NO_WORSE = 1.5
N_GREEDY = 12
LOGIT_BOUND = 1e-3  # NMSE 1e-9 of logits that reach 30 is a tenth of it
# Of all prompts and mixes together: on a base that rounds its activations one prompt is one draw
# of roundings (one by one loragraph's error is 0.5 to 1.5 times libllama's).
NO_WORSE_IN_ALL = 1.15
# Two answers as good as each other and unlike are apart by up to twice their distance to PEFT.
APART_IN_ALL = 1.5


class Quantised:
    """The base as it is (Q4_1), with the logits of libllama for every mix and prompt."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.adapters = {name: model.load_adapter(path) for name, path in ADAPTERS.items()}
        with Libllama(smollm_path(), n_ctx=256, flash=True, n_threads=2) as oracle:
            handles = {name: oracle.load_adapter(path) for name, path in ADAPTERS.items()}
            self.expected = {}
            for name, mix in CASES.items():
                oracle.set_adapters({handles[adapter]: s for adapter, s in mix.items()})
                self.expected[name] = [oracle.logits(prompt) for prompt in PROMPTS]

    def logits(self, mode: Mode, lowering: LoweringName) -> dict[str, list[Logits]]:
        """loragraph's, for every mix and prompt."""
        out = {}
        with open_context(self.model, mode, lowering=lowering, n_threads=2) as context:
            for name, mix in CASES.items():
                scales = {self.adapters[adapter]: scale for adapter, scale in mix.items()}
                out[name] = [run(context, prompt, scales) for prompt in PROMPTS]
        return out


@pytest.fixture(scope="module")
def quantised() -> Iterator[Quantised]:
    """Loaded once."""
    with Model.load(smollm_path(), n_threads=2) as model:
        yield Quantised(model)


@pytest.mark.parametrize(
    ("mode", "lowering"),
    [
        pytest.param(mode, lowering, marks=() if lowering == "routed" else pytest.mark.slow)
        for mode in ("flash", "default")
        for lowering in LOWERINGS
    ],
)
def test_the_q4_1_base_is_as_near_to_peft_as_libllama(
    mode: str, lowering: LoweringName, quantised: Quantised
) -> None:
    """With the file's own Q4_1 weights, every mix and prompt of the golden file: libllama's bits
    where the order of operations is its own, and in all an error against PEFT, on the dequantised
    base, that is libllama's, in any lowering and with either attention."""
    actual = quantised.logits(MODES[mode], lowering)
    ours, theirs, apart = [], [], []
    for name, mix in CASES.items():
        expected = quantised.expected[name]
        ours += _golden_errors(actual[name], name)
        theirs += _golden_errors(expected, name)
        apart += [nmse(a, e) for a, e in zip(actual[name], expected, strict=True)]
        own_products = not same_base(lowering, "Q4_1")
        if mode == "flash" and not own_products and len(mix) < (2 if lowering == "branch" else 1):
            # The head is Q8_0, and nothing follows it whose rounding could flip.
            head = 0 if same_base(lowering, "Q8_0") else 1e-12
            assert max(apart[-len(PROMPTS) :]) <= head, name
    assert sum(ours) <= NO_WORSE_IN_ALL * sum(theirs)
    assert sum(apart) <= APART_IN_ALL * sum(theirs)


@pytest.fixture(scope="module")
def base_f32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The base in F32: 0.6 GB, taken away afterwards."""
    path = merge(smollm_path(), [], tmp_path_factory.mktemp("smollm") / "f32.gguf")
    yield path
    path.unlink()


@pytest.mark.slow
def test_exact_mode_is_peft(base_f32: Path) -> None:
    """Every mix on an F32 base, one adapter at scale 1 and 0.5 and two: PEFT's logits, and PEFT's
    greedy ids."""
    libllama = _libllama_errors(base_f32)
    with Model.load(base_f32) as model:
        loaded = {name: model.load_adapter(path) for name, path in ADAPTERS.items()}
        for lowering in LOWERINGS:
            with open_context(model, EXACT, lowering=lowering, n_threads=2) as context:
                for name, mix in CASES.items():
                    scales = {loaded[adapter]: scale for adapter, scale in mix.items()}
                    rows = _with_greedy(context, scales, name)
                    heads = [one[: len(p)] for one, p in zip(rows, PROMPTS, strict=True)]
                    for ours, theirs in zip(
                        _golden_errors(heads, name), libllama[name], strict=True
                    ):
                        rounds = lowering != "routed" and mix  # ggml rounds x to A's F16
                        assert ours <= (NO_WORSE * theirs if rounds else EXACT_NMSE), name
                    _check_greedy(rows, name)
        _check_greedy_step_by_step(model, {loaded["pirate"]: 1.0, loaded["poem"]: 0.4})


def _with_greedy(context: Context, scales: dict[Adapter, float], name: str) -> list[Logits]:
    """Logits of each prompt and of PEFT's greedy ids behind it."""
    with np.load(ROOT / "demos/golden/demo.npz") as arrays:
        texts = [arrays[f"{name}.greedy{i}"].tolist() for i in range(len(PROMPTS))]
    return [
        run(context, prompt + text[:-1], scales)
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]


def _check_greedy(rows: list[Logits], name: str) -> None:
    """Behind PEFT's greedy ids PEFT's next one comes, but where its two best are as good."""
    with np.load(ROOT / "demos/golden/demo.npz") as arrays:
        for i, prompt in enumerate(PROMPTS):
            expected, gaps = arrays[f"{name}.greedy{i}"], arrays[f"{name}.gap{i}"]
            decided = gaps > 2 * LOGIT_BOUND
            assert decided.sum() >= 30, name  # of 32
            chosen = rows[i][len(prompt) - 1 :].argmax(axis=1)
            assert np.array_equal(chosen[decided], expected[decided]), (name, i)


def _golden_errors(rows: list[Logits], name: str) -> list[float]:
    """NMSE of the columns that the golden file keeps, for each prompt."""
    with np.load(ROOT / "demos/golden/demo.npz") as arrays:
        columns = arrays["subset"]
        return [nmse(one[:, columns], arrays[f"{name}.logits{i}"]) for i, one in enumerate(rows)]


def _libllama_errors(base: Path) -> dict[str, list[float]]:
    out = {}
    with Libllama(base, n_ctx=256, kv_type="f32", n_threads=2) as oracle:
        handles = {name: oracle.load_adapter(path) for name, path in ADAPTERS.items()}
        for name in CASES:
            oracle.set_adapters({handles[adapter]: s for adapter, s in CASES[name].items()})
            out[name] = _golden_errors([oracle.logits(prompt) for prompt in PROMPTS], name)
    return out


def _check_greedy_step_by_step(model: Model, scales: dict[Adapter, float]) -> None:
    """PEFT's greedy ids from ours, one call a token, up to the first near tie."""
    with (
        np.load(ROOT / "demos/golden/demo.npz") as arrays,
        open_context(model, EXACT, n_threads=2) as context,
    ):
        expected = arrays["pirate_poem.greedy0"][:N_GREEDY]
        gaps = arrays["pirate_poem.gap0"][:N_GREEDY]
        row, actual = run(context, PROMPTS[0], scales)[-1], []
        for _ in expected:
            actual.append(int(row.argmax()))
            row = context.decode(actual[-1:])[0]
        pairs = np.stack([gaps, np.zeros_like(gaps)], axis=1)
        outcome = greedy_agreement(actual, expected.tolist(), pairs, LOGIT_BOUND)
        assert outcome.agrees
        assert outcome.n_compared > 8
