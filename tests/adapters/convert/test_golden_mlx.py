"""Adapters of mlx-lm against MLX: its files, its logits (demos/train_mlx.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph import Model, convert, merge
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    EXACT,
    LOWERINGS,
    LoweringName,
    libllama_logits,
    loragraph_logits,
    open_context,
    run,
)
from tests.reference.adapter import read_tensors

GOLDEN = Path(__file__).parents[2] / "golden" / "mlx_variants"
ABOUT: dict[str, Any] = json.loads((GOLDEN / "mlx.json").read_text())["variants"]

# Measured: at most 5e-13, with experts, whose logits are MLX's in float32, too.
BOUND = 2e-12


def base_of(name: str) -> Path:
    """The base of a variant, shared with those of PEFT."""
    return GOLDEN.parent / "peft_variants" / str(ABOUT[name]["base"])


def expected(name: str) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """MLX's logits for each prompt."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return [arrays[f"logits{i}"] for i in range(len(ABOUT[name]["prompts"]))]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", ABOUT)
def test_a_folder_of_mlx_gives_mlxs_logits(name: str, lowering: LoweringName) -> None:
    """Layers from the end, DoRA, a tied table, experts: as mlx-lm computes them."""
    with Model.load(base_of(name), n_threads=1) as model:
        adapter = model.load_adapter(GOLDEN / name)
        with open_context(model, EXACT, lowering=lowering) as context:
            for prompt, logits in zip(ABOUT[name]["prompts"], expected(name), strict=True):
                assert nmse(run(context, prompt, {}), logits) > 1e-3
                assert nmse(run(context, prompt, {adapter: 1.0}), logits) <= BOUND


@pytest.mark.parametrize("name", ABOUT)
def test_merged_and_in_libllama(name: str, tmp_path: Path) -> None:
    """The merged file gives MLX's logits, and so does libllama where it can load the adapter."""
    path, plan = convert(GOLDEN / name, base_of(name), tmp_path / "a.gguf")
    merge(base_of(name), {path: 1.0}, tmp_path / "merged.gguf")
    prompt, wanted = ABOUT[name]["prompts"][0], expected(name)[0]
    for logits in (loragraph_logits, libllama_logits):
        merged = logits(tmp_path / "merged.gguf", [], [()], prompt, EXACT)[()]
        assert nmse(merged, wanted) <= 10 * BOUND
    if not plan.llama_cpp:
        own = libllama_logits(base_of(name), [path], [(1.0,)], prompt, EXACT)[1.0,]
        assert nmse(own, wanted) <= BOUND


def test_the_scale_is_mlxs_own(tmp_path: Path) -> None:
    """mlx-lm multiplies by `scale` as it is: the effective scale of each pair is that number."""
    path, plan = convert(GOLDEN / "lora", base_of("lora"), tmp_path / "a.gguf")
    assert plan.config.source == "mlx"
    assert {scale for target in plan.targets for scale in target.scales} == {2.5}
    assert {target.target.split(".")[1] for target in plan.targets} == {"1"}  # num_layers: 1
    ranks = {len(a) for name, a in read_tensors(path).items() if name.endswith("lora_a")}
    assert plan.alpha / ranks.pop() == 2.5
    assert not ranks


def test_a_tied_table_of_mlx_changes_the_head_too(tmp_path: Path) -> None:
    """mlx-lm's adapter of a table acts wherever the table does."""
    _, plan = convert(GOLDEN / "tied", base_of("tied"), tmp_path / "a.gguf")
    assert plan.tied_output is True
