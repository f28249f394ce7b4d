"""Trained biases and norms without a low-rank pair, converted to vectors of differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from loragraph import convert, diagnose, plan
from loragraph.adapters.convert import plan_conversion
from loragraph.cli.main import app
from tests.adapters.convert.folders import (
    N_EMBD,
    N_HEAD,
    N_HEAD_KV,
    N_ROT,
    layers,
    lora,
    normal,
    peft,
    write_base,
)
from tests.adapters.convert.test_convert import permuted
from tests.adapters.convert.test_golden import GOLDEN, base_of, converted
from tests.reference.adapter import read_tensors

PREFIX = "base_model.model."
ATTENTION = "model.layers.0.self_attn"
N_Q, N_KV = N_HEAD * N_ROT, N_HEAD_KV * N_ROT


def trained_biases() -> dict[str, NDArray[np.float32]]:
    """Biases of q and v, without a pair, as PEFT names them."""
    return {
        f"{PREFIX}{ATTENTION}.q_proj.bias": normal(1, N_Q),
        f"{PREFIX}{ATTENTION}.v_proj.bias": normal(2, N_KV),
    }


def test_biases_alone_are_differences_in_the_bases_row_order(tmp_path: Path) -> None:
    """Of one that the base has, and of one that it has not, beside a pair of another module."""
    old = normal(7, N_Q)
    base = write_base(tmp_path / "base.gguf", extra={"blk.0.attn_q.bias": permuted(old, N_HEAD)})
    tensors = lora(layers(("mlp.up_proj",))) | trained_biases()
    path, made = convert(peft(tmp_path / "peft", tensors, bias="all"), base)
    stored = read_tensors(path)
    q, v = trained_biases().values()
    expected = permuted(q - old, N_HEAD)
    np.testing.assert_allclose(stored["blk.0.attn_q.weight.lora_bias"], expected, atol=1e-6)
    np.testing.assert_array_equal(stored["blk.0.attn_v.weight.lora_bias"], v)
    assert "blk.0.attn_q.weight.lora_a" not in stored
    assert made.own_keys == ("lora_bias",)
    assert "no field for lora_bias" in made.llama_cpp


@pytest.mark.parametrize("apart", [True, False], ids=["biases apart", "one bias"])
def test_biases_of_parts_of_a_fused_weight(apart: bool, tmp_path: Path) -> None:
    """Each in its rows, less the base's own bias, whichever way the base keeps that."""
    old = {"q": normal(7, N_Q), "k": normal(8, N_KV), "v": normal(9, N_KV)}
    if apart:
        extra = {f"blk.0.attn_{name}.bias": values for name, values in old.items()}
    else:
        extra = {"blk.0.attn_qkv.bias": np.concatenate(list(old.values()))}
    base = write_base(tmp_path / "base.gguf", "phi3", fused=True, extra=extra)
    path, _ = convert(peft(tmp_path / "peft", trained_biases(), bias="all"), base)
    q, v = trained_biases().values()
    expected = np.concatenate([q - old["q"], np.zeros(N_KV), v - old["v"]])
    stored = read_tensors(path)
    np.testing.assert_allclose(stored["blk.0.attn_qkv.weight.lora_bias"], expected, atol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma", "gemma2", "gemma3"])
def test_norms_are_differences_to_what_the_file_holds(arch: str, tmp_path: Path) -> None:
    """Gemma's checkpoints hold w where its files hold 1 + w."""
    old = normal(5, N_EMBD)
    base = write_base(tmp_path / "base.gguf", arch, extra={"output_norm.weight": old})
    new = normal(6, N_EMBD)
    tensors = {f"{PREFIX}model.norm.weight": new}
    folder = peft(tmp_path / "peft", tensors, modules_to_save=["norm"])
    path, made = convert(folder, base)
    one = 1 if arch.startswith("gemma") else 0
    stored = read_tensors(path)
    assert stored.keys() == {"output_norm.weight.lora_delta"}
    expected = (new.astype(np.float64) + one - old).astype(np.float32)
    np.testing.assert_array_equal(stored["output_norm.weight.lora_delta"], expected)
    (target,) = made.to_dict()["targets"]
    assert (target["rank"], target["delta"], target["method"]) == (0, True, "vector")


def test_a_norm_that_was_not_trained_is_left_out_and_told(tmp_path: Path) -> None:
    """A saved norm that modules_to_save does not name is the base's own."""
    base = write_base(tmp_path / "base.gguf")
    tensors = lora(layers(("mlp.up_proj",)))
    name = f"{PREFIX}model.layers.0.input_layernorm.weight"
    made = plan_conversion(peft(tmp_path / "peft", {**tensors, name: normal(1, N_EMBD)}), base)
    assert made.skipped == (name,)
    assert made.own_keys == ()


def test_norms_of_a_folded_base_are_refused(tmp_path: Path) -> None:
    """Its weights are not those of the checkpoint: the reason is told, nothing is written."""
    base = write_base(tmp_path / "base.gguf", metadata={"prism.hadamard.version": np.uint32(1)})
    tensors = {f"{PREFIX}model.norm.weight": normal(6, N_EMBD)}
    folder = peft(tmp_path / "peft", tensors, modules_to_save=["norm"])
    with pytest.raises(Exception, match="Hadamard-folded"):
        convert(folder, base, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_commands_take_an_adapter_of_vectors_alone(tmp_path: Path) -> None:
    """An adapter without a pair is shown, planned, combined, diagnosed and run."""
    name = "ln_tuning"
    base, folder = base_of(name), GOLDEN / name
    path, _ = converted(name, tmp_path)

    def run(*words: object) -> str:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "output_norm.weight" in run("convert", folder, "--base", base, "--dry-run")
    for file in (path, folder):
        facts = json.loads(run("inspect", file, "--base", base, "--json"))
        assert {one["target"] for one in facts["weights"]} == {
            "blk.0.attn_norm.weight", "blk.1.attn_norm.weight", "output_norm.weight",
        }  # fmt: skip
        assert facts["targets"]["attn_norm"] == {"changed": 2, "in_base": 2, "ranks": []}
        assert "output_norm.weight + lora_delta" in run("inspect", file, "--base", base)
        found = diagnose(base, file, text="the thing", peft=folder, n_threads=1)
        assert any("no low-rank pair" in finding.message for finding in found.findings)
        assert any("3 norms change by" in finding.message for finding in found.findings)
        assert 0 < found.numbers["norm_change_ratio"]["median"] < 1
    cost = plan(base, [path]).adapters[0]
    assert (cost.n_targets, cost.params, cost.bytes_token) == (3, 96, 4 * 96)
    run("combine", f"{path}:0.5", "-o", tmp_path / "c.gguf")
    half = read_tensors(tmp_path / "c.gguf")
    for key, values in read_tensors(path).items():
        np.testing.assert_array_equal(half[key], np.float32(0.5) * values)
    words = ("run", base, "-p", "x", "-n", 8, "-c", 64, "-t", 1, "--temp", 0, "--ignore-eos")
    answers = [run(*words, "--lora-scaled", f"{file}:0.5") for file in (path, folder)]
    assert answers[0] == answers[1]
    facts = json.loads(run(*words, "--lora-scaled", f"{path}:0.5", "--json"))
    assert facts["adapters"][0]["effective_scales"] == [0.5]
