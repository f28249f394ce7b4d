"""Converted adapters against PEFT: its folders, its logits in float64 (demos/train_variants.py)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph import Request, SamplingParams, convert
from loragraph.adapters.convert import Plan
from loragraph.adapters.convert.write import OUT_TYPES, OutType
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.graph.arch import FAMILIES
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    EXACT,
    LOWERINGS,
    LoweringName,
    libllama_logits,
    open_context,
    run,
)
from tests.oracle.libllama import Libllama

GOLDEN = Path(__file__).parents[2] / "golden" / "peft_variants"
ABOUT: dict[str, Any] = {
    name: about
    for file in ("variants.json", "families.json")
    for name, about in json.loads((GOLDEN / file).read_text())["variants"].items()
    if about.get("arch", "llama") in FAMILIES
}
ALORA = "alora"

# The issue asks for 1e-9. Measured: at most 6e-13 (float32 rounding).
EXACT_NMSE = 2e-12
# Measured with outtype f16, bf16 and q8_0: at most 4e-7, 2e-5 and 2e-4.
TYPE_NMSE = {"f32": EXACT_NMSE, "f16": 2e-6, "bf16": 1e-4, "q8_0": 1e-3}


@cache
def expected(name: str) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """PEFT's logits for each prompt of a variant."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return [arrays[f"logits{i}"] for i in range(len(ABOUT[name]["prompts"]))]


def base_of(name: str) -> Path:
    """The base that a variant was trained on."""
    return GOLDEN / str(ABOUT[name]["base"])


def converted(name: str, folder: Path, outtype: OutType = "f32") -> tuple[Path, Plan]:
    """A variant as a GGUF file."""
    return convert(GOLDEN / name, base_of(name), folder / f"{name}.gguf", outtype=outtype)


def worst(name: str, path: Path, lowering: LoweringName = "routed") -> float:
    """The largest NMSE of any prompt, in exact mode."""
    with Model.load(base_of(name), n_threads=1) as model:
        adapter = model.load_adapter(path)
        with open_context(model, EXACT, lowering=lowering) as context:
            return max(
                nmse(run(context, prompt, {adapter: 1.0}), logits)
                for prompt, logits in zip(ABOUT[name]["prompts"], expected(name), strict=True)
            )


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", [name for name in ABOUT if name != ALORA])
def test_a_converted_adapter_gives_pefts_logits(
    name: str, lowering: LoweringName, tmp_path: Path
) -> None:
    """Every kind of adapter that PEFT trained gives PEFT's logits in exact mode."""
    path, _ = converted(name, tmp_path)
    assert worst(name, path, lowering) <= EXACT_NMSE


@pytest.mark.parametrize("outtype", list(OUT_TYPES))
@pytest.mark.parametrize("name", ["plain", "patterns", "modules_to_save"])
def test_every_type_is_as_close_as_it_can_store(
    name: str, outtype: OutType, tmp_path: Path
) -> None:
    """f16, bf16 and q8_0 files differ from PEFT by their rounding alone."""
    path, _ = converted(name, tmp_path, outtype)
    assert worst(name, path) <= TYPE_NMSE[outtype]


@pytest.mark.parametrize("name", [name for name in ABOUT if name != ALORA])
def test_files_without_own_keys_load_in_libllama_and_agree(name: str, tmp_path: Path) -> None:
    """Where the plan says that llama.cpp loads the file, it does, with the same logits."""
    path, plan = converted(name, tmp_path)
    prompts = ABOUT[name]["prompts"]
    if plan.own_keys or name == "tied_head":  # what llama.cpp ends the process on is not tried
        with Libllama(base_of(name), n_ctx=256) as oracle, pytest.raises(Exception, match="LoRA"):
            oracle.load_adapter(path)
        return
    if plan.llama_cpp:
        assert "token table" in plan.llama_cpp or "tied head" in plan.llama_cpp
        return
    logits = libllama_logits(base_of(name), [path], [(1.0,)], prompts[0], EXACT)[(1.0,)]
    assert nmse(logits, expected(name)[0]) <= EXACT_NMSE


def test_an_alora_is_peft(tmp_path: Path) -> None:
    """Base up to the last invocation, adapter from it on: PEFT's logits for every token."""
    path, plan = converted(ALORA, tmp_path)
    assert plan.config.invocation_tokens == (7, 41)
    with Model.load(base_of(ALORA), n_threads=1) as model:
        adapter = model.load_adapter(path)
        for prompt, logits in zip(ABOUT[ALORA]["prompts"], expected(ALORA), strict=True):
            start = _last(prompt, [7, 41])
            with open_context(model, EXACT) as context:
                parts = [run(context, prompt[:start], {})] if start else []
                context.set_adapters({adapter: 1.0})
                if prompt[start:]:
                    parts.append(context.decode(prompt[start:]))
            assert nmse(np.concatenate(parts), logits) <= EXACT_NMSE


@pytest.mark.parametrize("lowering", ["routed", "stacked"])
def test_an_alora_through_the_engine_is_peft(lowering: LoweringName, tmp_path: Path) -> None:
    """With the base's history in the tree: PEFT's numbers, and the base's cells are shared.

    Each prompt goes in twice, scored (PEFT's log-probability of every token) and continued (PEFT's
    most likely token), after the base computed the history before the invocation.
    """
    path, _ = converted(ALORA, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    with Engine(
        base_of(ALORA), {ALORA: path}, lowering=lowering, kv_type="f32", attention="plain",
        n_ctx=256, n_threads=1,
    ) as engine:  # fmt: skip
        for prompt, logits in zip(ABOUT[ALORA]["prompts"], expected(ALORA), strict=True):
            start = _last(prompt, [7, 41])
            engine.run(Request(prompt[: start + 2], None, greedy))
            result = engine.run(Request(prompt, {ALORA: 1.0}, greedy))
            active = start if start < len(prompt) else None
            assert result.adapters[0].active_from == active
            # The base knows its own cells, and of a prompt the last token is always computed.
            assert result.n_cached == min(start, len(prompt) - 1)
            assert result.tokens == (int(logits[-1].argmax()),) or result.finish_reason == "stop"
            score = engine.score(prompt, {ALORA: 1.0})
            wanted = _log_probabilities(logits[:-1], prompt[1:])
            np.testing.assert_allclose(score.logprobs, wanted, rtol=0, atol=2e-5)


def _log_probabilities(
    logits: np.ndarray[Any, np.dtype[np.float32]], tokens: list[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    out: np.ndarray[Any, np.dtype[np.float64]] = rows[np.arange(len(tokens)), tokens] - np.log(
        np.exp(rows).sum(axis=1)
    )
    return out


def _last(prompt: list[int], wanted: list[int]) -> int:
    """Where `wanted` stands last in the prompt, its length where it does not."""
    n = len(wanted)
    found = [i for i in range(len(prompt) - n + 1) if prompt[i : i + n] == wanted]
    return found[-1] if found else len(prompt)
