"""adapter_config.json files as they are found in the wild: the right plan or the right refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loragraph.adapters.convert import Plan, plan_conversion
from loragraph.errors import AdapterFormatError, LoragraphError, UnsupportedError
from tests.adapters.convert.folders import (
    GGUF_NAMES,
    MODULES,
    N_EMBD,
    N_FF,
    N_LAYER,
    N_VOCAB,
    layers,
    lora,
    normal,
    safetensors_bytes,
    write_base,
)

CONFIGS = Path(__file__).parent / "configs"
ALL = tuple(MODULES)
QV = ("self_attn.q_proj", "self_attn.v_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Expected(NamedTuple):
    """What a configuration becomes, with tensors for `modules` in every layer."""

    arch: str
    modules: tuple[str, ...]
    rank: int
    alpha: float
    prefix: str = "base_model.model."
    scale: float | None = None  # None: alpha / rank


PLANS: Mapping[str, Expected] = {
    "cosmos_reason2_2b_p0181": Expected(
        "qwen3", ALL, 32, 64, "base_model.model.model.language_model."
    ),
    "internlm7b_localpath_base": Expected("llama", ALL, 64, 16),
    "llama2_e_ancient": Expected("llama", ATTENTION, 8, 16),
    "llama2_old_peft_minimal": Expected("llama", QV, 32, 16),
    "llama31_8b_unsloth_dup_targets": Expected("llama", ALL, 16, 16),
    "llama32_3b_qv_r8_a32": Expected("llama", QV, 8, 32),
    "llamion_14b_qvo": Expected("llama", (*QV, "self_attn.o_proj"), 16, 16),
    "mistral7b_qv": Expected("llama", QV, 8, 32),
    "peft_lora_r8_minimal": Expected("llama", QV, 8, 16),
    "peft_mica_r32": Expected("llama", QV, 32, 64),
    "peft_mlp_r10": Expected("llama", MLP, 10, 20),
    "peft_rslora_r64": Expected("llama", QV, 64, 64 * 8, scale=8.0),
    "qwen25_coder_15b_7mods": Expected("qwen2", ALL, 8, 16),
    "qwen3_06b_qv": Expected("qwen3", QV, 16, 32),
    "qwen3_4b_r64_a128": Expected("qwen3", ALL, 64, 128),
}
REFUSED: Mapping[str, tuple[type[LoragraphError], str]] = {
    "git_lfs_pointer": (AdapterFormatError, "Git-LFS pointer.*git lfs pull"),
    "peft_adalora": (UnsupportedError, r"ADALORA.*lora_E.*merge_and_unload"),
    "peft_bdlora_r14": (UnsupportedError, "use_bdlora.*block-diagonal.*merge_and_unload"),
    "peft_ia3": (UnsupportedError, "IA3.*scales activations.*merge_and_unload"),
    "peft_loha": (UnsupportedError, "LOHA.*element by element.*merge_and_unload"),
}
SPECIAL = {
    "glm4_9b_fused_names",
    "issue_llamacpp3651_lm_head_target",
    "issue_vllm9280_modules_to_save",
    "peft_dora_r32",
}


def test_every_file_has_its_row() -> None:
    """No configuration is left out of the tables."""
    files = {path.stem for path in CONFIGS.glob("*.json")}
    assert files == PLANS.keys() | REFUSED.keys() | SPECIAL


def plan_for(name: str, folder: Path, base: Path, tensors: Mapping[str, Any]) -> Plan:
    """The plan of a configuration with these tensors."""
    folder.mkdir(exist_ok=True)
    shutil.copy(CONFIGS / f"{name}.json", folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return plan_conversion(folder, base)


@pytest.mark.parametrize("name", PLANS)
def test_a_plain_configuration_gives_the_right_plan(name: str, tmp_path: Path) -> None:
    """Targets, ranks, alpha and effective scale, with nothing to fold and nothing of our own."""
    row = PLANS[name]
    modules = layers(row.modules)
    prefix = "base_model.model."
    if row.prefix != prefix:
        modules = {path.removeprefix("model."): shape for path, shape in modules.items()}
    base = write_base(tmp_path / "base.gguf", row.arch)
    plan = plan_for(name, tmp_path / "peft", base, lora(modules, row.rank, row.prefix))

    assert {target.target for target in plan.targets} == {
        f"blk.{il}.{GGUF_NAMES[module]}.weight" for il in range(N_LAYER) for module in row.modules
    }
    assert {target.rank for target in plan.targets} == {row.rank}
    assert plan.alpha == pytest.approx(row.alpha, rel=1e-6)
    scale = row.alpha / row.rank if row.scale is None else row.scale
    scales = {one for target in plan.targets for one in target.scales}
    assert sorted(scales) == [pytest.approx(scale)]
    assert {plan.factor(target, piece) for target in plan.targets for piece in target.pieces} == {1}
    assert plan.llama_cpp == ""


@pytest.mark.parametrize("name", REFUSED)
def test_another_method_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """What cannot be carried over is named, with the reason and what to do."""
    kind, message = REFUSED[name]
    base = write_base(tmp_path / "base.gguf")
    with pytest.raises(kind, match=message):
        plan_for(name, tmp_path / "peft", base, lora(layers(QV), 8))


def test_fused_names_of_glm(tmp_path: Path) -> None:
    """query_key_value and dense_h_to_4h are what the base's fused tensors come of."""
    prefix = "transformer.encoder.layers"
    modules: dict[str, tuple[int, int]] = {}
    for il in range(N_LAYER):
        modules |= {
            f"{prefix}.{il}.self_attention.query_key_value": (64, N_EMBD),
            f"{prefix}.{il}.self_attention.dense": (N_EMBD, N_EMBD),
            f"{prefix}.{il}.mlp.dense_h_to_4h": (2 * N_FF, N_EMBD),
            f"{prefix}.{il}.mlp.dense_4h_to_h": (N_EMBD, N_FF),
        }
    base = write_base(tmp_path / "base.gguf", "chatglm", fused=True)
    plan = plan_for("glm4_9b_fused_names", tmp_path / "peft", base, lora(modules, 8))
    parts = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    assert {target.target for target in plan.targets} == {
        f"blk.{il}.{part}.weight" for il in range(N_LAYER) for part in parts
    }
    assert {target.scales for target in plan.targets} == {(2.0,)}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_as_a_target(tied: bool, tmp_path: Path) -> None:
    """lm_head's pair is output.weight's; on a tied base it changes the head alone, for us alone."""
    tensors = lora({**layers(), "lm_head": (N_VOCAB, N_EMBD)}, 8)
    base = write_base(tmp_path / "base.gguf", tied=tied)
    plan = plan_for("issue_llamacpp3651_lm_head_target", tmp_path / "peft", base, tensors)
    assert "output.weight" in {target.target for target in plan.targets}
    assert plan.llama_cpp == ("it cannot change a tied head alone" if tied else "")
    assert plan.tied_output is None


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save_become_pairs_of_full_rank(tied: bool, tmp_path: Path) -> None:
    """Table and head that were trained whole are pairs whose rank is the embedding's width."""
    tensors = lora(layers(), 32)
    tensors["base_model.model.model.embed_tokens.weight"] = normal(1, N_VOCAB, N_EMBD)
    tensors["base_model.model.lm_head.weight"] = normal(2, N_VOCAB, N_EMBD)
    base = write_base(tmp_path / "base.gguf", "qwen2", tied=tied)
    plan = plan_for("issue_vllm9280_modules_to_save", tmp_path / "peft", base, tensors)
    whole = {t.target: t.rank for t in plan.targets if t.pieces[0].method == "weights"}
    assert whole == {"token_embd.weight": N_EMBD, "output.weight": N_EMBD}
    assert plan.tied_output is (False if tied else None)


def test_modules_to_save_must_be_there(tmp_path: Path) -> None:
    """What the configuration says was trained, and the file does not hold, is missed."""
    base = write_base(tmp_path / "base.gguf", "qwen2")
    with pytest.raises(AdapterFormatError, match="modules_to_save names 'embed_tokens'"):
        plan_for("issue_vllm9280_modules_to_save", tmp_path / "peft", base, lora(layers(), 32))


def test_dora_carries_its_magnitudes(tmp_path: Path) -> None:
    """Magnitude vectors become tensors of our own, which llama.cpp refuses."""
    tensors = lora(layers(QV), 32)
    for module, (n_out, _) in layers(QV).items():
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = normal(3, n_out)
    base = write_base(tmp_path / "base.gguf")
    plan = plan_for("peft_dora_r32", tmp_path / "peft", base, tensors)
    assert all(target.magnitude for target in plan.targets)
    assert plan.own_keys == ("lora_magnitude",)
    assert "no field for lora_magnitude" in plan.llama_cpp


def test_dora_without_magnitudes_is_refused(tmp_path: Path) -> None:
    """A DoRA configuration beside plain weights is of another training."""
    base = write_base(tmp_path / "base.gguf")
    with pytest.raises(AdapterFormatError, match="expected a magnitude vector"):
        plan_for("peft_dora_r32", tmp_path / "peft", base, lora(layers(QV), 32))


def test_dry_run_shows_the_plan_of_each(tmp_path: Path) -> None:
    """A plan is JSON values throughout."""
    base = write_base(tmp_path / "base.gguf")
    plan = plan_for("mistral7b_qv", tmp_path / "peft", base, lora(layers(QV), 8))
    facts = json.loads(json.dumps(plan.to_dict()))
    assert facts["coverage"]["attn_q"] == {"changed": 2, "in_base": 2}
    assert facts["llama_cpp"] == "loads it"
    assert facts["targets"][0]["modules"] == ["model.layers.0.self_attn.q_proj"]
