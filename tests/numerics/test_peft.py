"""Against PEFT: logits that transformers and PEFT computed in float64 for tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine.model import Model
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, LOWERINGS, MODES, LoweringName, Mode, open_context, run
from tests.oracle.libllama import Libllama

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_peft"

# The issue asks for 1e-9. Measured: at most 5e-13 (float32 rounding).
EXACT_NMSE = 2e-12
# Measured with F16 cells: at most 1.4e-6 with flash attention, libllama exactly the same, and 6e-7
# by default, over cells, whose sums are F32 where ggml's flash attention sums V in F16.
HALF_NMSE = {"flash": 5e-6, "default": 2e-6}
# Over libllama's error. Measured: at most 1.01 and 0.55.
NO_WORSE = {"flash": 1.05, "default": 1.0}

CASES = [
    (name, case["name"])
    for name in ("tied", "untied")
    for case in json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
]


class Case:
    """One mix of one base: prompts, adapters by scale, and PEFT's logits."""

    def __init__(self, base: str, name: str) -> None:
        about: dict[str, Any] = json.loads((GOLDEN / f"{base}.json").read_text())
        (case,) = (case for case in about["cases"] if case["name"] == name)
        self.base = GOLDEN / about["base"]
        self.prompts: list[list[int]] = about["prompts"]
        self.mix = {GOLDEN / about["adapters"][key]: scale for key, scale in case["mix"].items()}
        with np.load(GOLDEN / f"{base}.npz") as arrays:
            self.expected = [arrays[f"{name}.logits{i}"] for i in range(len(self.prompts))]

    def errors(self, lowering: LoweringName, mode: Mode) -> list[float]:
        """loragraph's NMSE for each prompt."""
        with Model.load(self.base, n_threads=1) as model:
            scales = {model.load_adapter(path): scale for path, scale in self.mix.items()}
            with open_context(model, mode, lowering=lowering) as context:
                return [
                    nmse(run(context, prompt, scales), expected)
                    for prompt, expected in zip(self.prompts, self.expected, strict=True)
                ]

    def libllama_errors(self) -> list[float]:
        """libllama's NMSE for each prompt, with F16 cells and flash attention."""
        with Libllama(self.base, n_ctx=256, flash=True) as oracle:
            oracle.set_adapters(
                {oracle.load_adapter(path): scale for path, scale in self.mix.items()}
            )
            return [
                nmse(oracle.logits(prompt), expected)
                for prompt, expected in zip(self.prompts, self.expected, strict=True)
            ]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("base", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_exact_mode_is_peft(base: str, name: str, lowering: LoweringName) -> None:
    """Base, adapters of linear weights, table and head, scaled and mixed: PEFT's logits."""
    assert max(Case(base, name).errors(lowering, EXACT)) <= EXACT_NMSE


@pytest.mark.parametrize("mode", HALF_NMSE)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("base", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_f16_cells_are_no_worse_than_libllamas(
    base: str, name: str, lowering: LoweringName, mode: str
) -> None:
    """With F16 cells and either attention the error is at most a multiple of libllama's.

    libllama aborts on an adapter of a tied table: there the bound alone holds.
    """
    case = Case(base, name)
    errors = case.errors(lowering, MODES[mode])
    assert max(errors) <= HALF_NMSE[mode]
    if base != "tied" or not any("embed" in path.name for path in case.mix):
        for ours, libllama in zip(errors, case.libllama_errors(), strict=True):
            assert ours <= NO_WORSE[mode] * libllama
