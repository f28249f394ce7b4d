"""loragraph.convert: names, row orders, fused weights, experts, MLX, refusals, files."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph import LoragraphError, convert
from loragraph.adapters.gguf import read_adapter
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    ConfigError,
    UnsupportedError,
)
from loragraph.ggml.lib import load_library
from loragraph.tools.convert import plan_conversion
from loragraph.tools.inspect import read_base_info
from tests.reference.adapter import read_tensors
from tests.tools.convert.folders import (
    GGUF_NAMES,
    MODULES,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    N_LAYER,
    N_ROT,
    N_VOCAB,
    layers,
    lora,
    normal,
    peft,
    safetensors_bytes,
    write_base,
)

Deltas = dict[str, NDArray[np.float64]]


def deltas(path: Path, base: Path) -> Deltas:
    """What a converted file adds to each weight, (n_expert,) (n_out, n_in); it must load."""
    lib = load_library(None)
    out: Deltas = {}
    with read_adapter(lib, path, read_base_info(lib, base)) as adapter:
        for name, pair in adapter.pairs.items():
            a = adapter.array(pair.a).astype(np.float64)
            b = adapter.array(pair.b).astype(np.float64)
            product = a @ b.T if name == "token_embd.weight" else b @ a
            out[name] = adapter.effective_scale(name) * product
    return out


def permuted(values: NDArray[Any], n_head: int) -> NDArray[Any]:
    """Row by row: what stood at i + n_rot/2 of a head goes behind what stood at i."""
    n_rot = len(values) // n_head
    order = [
        head * n_rot + half * (n_rot // 2) + i
        for head in range(n_head)
        for i in range(n_rot // 2)
        for half in range(2)
    ]
    return values[order]


def product(tensors: Mapping[str, Any], module: str, scale: float = 2.0) -> NDArray[np.float64]:
    """scale · B A of a module, (n_out, n_in)."""
    a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
    out: NDArray[np.float64] = scale * (b.astype(np.float64) @ a.astype(np.float64))
    return out


@pytest.mark.parametrize(
    ("arch", "reorders"), [("llama", True), ("granite", True), ("qwen2", False), ("gemma3", False)]
)
def test_rows_are_in_the_order_of_the_family(arch: str, reorders: bool, tmp_path: Path) -> None:
    """q and k rows are reordered head by head for llama and granite, and nothing else is."""
    base = write_base(tmp_path / "base.gguf", arch)
    tensors = lora(layers())
    path, plan = convert(peft(tmp_path / "peft", tensors), base)
    assert path == tmp_path / "peft-f32.gguf"
    assert plan.llama_cpp == ""
    found = deltas(path, base)
    for il in range(N_LAYER):
        for module, name in GGUF_NAMES.items():
            wanted = product(tensors, f"model.layers.{il}.{module}")
            if reorders and name in ("attn_q", "attn_k"):
                wanted = permuted(wanted, N_HEAD if name == "attn_q" else N_HEAD_KV)
            np.testing.assert_allclose(found[f"blk.{il}.{name}.weight"], wanted, atol=1e-5)


@pytest.mark.parametrize("infix", ["", ".default", ".my-adapter"])
@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "base_model.model.model.language_model.model.", ""]
)
def test_names_are_found_in_any_wrapping(prefix: str, infix: str, tmp_path: Path) -> None:
    """PEFT's prefix, an adapter's name in the key, and multimodal wrappings all mean one module."""
    base = write_base(tmp_path / "base.gguf", "qwen2")
    modules = layers(("self_attn.q_proj",))
    if "language_model" in prefix:
        modules = {path.removeprefix("model."): shape for path, shape in modules.items()}
    plan = plan_conversion(peft(tmp_path / "p", lora(modules, 4, prefix, infix)), base)
    assert [target.target for target in plan.targets] == [
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
    ]


def test_a_fused_module_is_cut_for_a_base_that_is_not(tmp_path: Path) -> None:
    """qkv_proj and gate_up_proj give q, k, v, gate and up their own rows of lora_B."""
    base = write_base(tmp_path / "base.gguf", "llama")
    n_q, n_kv = N_HEAD * N_ROT, N_HEAD_KV * N_ROT
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
    tensors = lora({qkv: (n_q + 2 * n_kv, N_EMBD), gate_up: (2 * N_FF, N_EMBD)})
    path, _ = convert(peft(tmp_path / "peft", tensors), base)
    found = deltas(path, base)
    q, k, v = np.split(product(tensors, qkv), [n_q, n_q + n_kv])
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], permuted(q, N_HEAD), atol=1e-5)
    np.testing.assert_allclose(found["blk.0.attn_k.weight"], permuted(k, N_HEAD_KV), atol=1e-5)
    np.testing.assert_allclose(found["blk.0.attn_v.weight"], v, atol=1e-5)
    gate, up = np.split(product(tensors, gate_up), 2)
    np.testing.assert_allclose(found["blk.0.ffn_gate.weight"], gate, atol=1e-5)
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"], up, atol=1e-5)


def test_modules_are_joined_for_a_fused_base(tmp_path: Path) -> None:
    """q, k, v with unlike ranks and alphas become one pair of the fused weight, exactly."""
    base = write_base(tmp_path / "base.gguf", "phi3", fused=True)
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    modules = layers(names, 1)
    ranks = {"model.layers.0.self_attn.v_proj": 6}
    tensors = lora(modules, ranks)
    folder = peft(
        tmp_path / "peft", tensors, rank_pattern={"v_proj": 6}, alpha_pattern={"gate_proj": 3}
    )
    path, _ = convert(folder, base)
    found = deltas(path, base)
    n_q, n_kv = N_HEAD * N_ROT, N_HEAD_KV * N_ROT
    wanted = np.zeros((n_q + 2 * n_kv, N_EMBD))
    wanted[:n_q] = product(tensors, "model.layers.0.self_attn.q_proj")
    wanted[n_q + n_kv :] = product(tensors, "model.layers.0.self_attn.v_proj", 8 / 6)
    np.testing.assert_allclose(found["blk.0.attn_qkv.weight"], wanted, atol=2e-5)
    both = [
        product(tensors, "model.layers.0.mlp.gate_proj", 3 / 4),
        product(tensors, "model.layers.0.mlp.up_proj"),
    ]
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"], np.concatenate(both), atol=2e-5)


def test_experts_one_by_one_are_stacked(tmp_path: Path) -> None:
    """Modules of single experts become a stack; an expert that was not trained stays as it was."""
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True)
    head = "model.layers.1.mlp.experts"
    modules = {f"{head}.{e}.down_proj": (N_EMBD, N_FF) for e in (0, 2)}
    ranks = {f"{head}.2.down_proj": 2}
    tensors = lora(modules, ranks)
    folder = peft(tmp_path / "peft", tensors, rank_pattern={r"experts\.2\.down_proj": 2})
    path, plan = convert(folder, base)
    assert [target.target for target in plan.targets] == ["blk.1.ffn_down_exps.weight"]
    found = deltas(path, base)["blk.1.ffn_down_exps.weight"]
    assert found.shape == (N_EXPERT, N_EMBD, N_FF)
    np.testing.assert_allclose(found[0], product(tensors, f"{head}.0.down_proj"), atol=1e-5)
    np.testing.assert_array_equal(found[1], 0)
    np.testing.assert_allclose(found[2], product(tensors, f"{head}.2.down_proj", 4), atol=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
def test_packed_experts(swapped: bool, tmp_path: Path) -> None:
    """PEFT's target_parameters: experts outside in A and inside in B, gate_up cut, old form too.

    In the old form A's columns are the parameter's rows, so its factors are the other way round.
    """
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True)
    head = "base_model.model.model.layers.0.mlp.experts"
    rank, tensors, wanted = 4, {}, {}
    sizes = {"gate_up_proj": (2 * N_FF, N_EMBD), "down_proj": (N_EMBD, N_FF)}
    for i, (parameter, (n_out, n_in)) in enumerate(sizes.items()):
        a = normal(10 + i, N_EXPERT, rank, n_out if swapped else n_in)
        b = normal(20 + i, n_in if swapped else n_out, rank, N_EXPERT)
        key = f"{head}.base_layer" if parameter == "gate_up_proj" else head
        tensors[f"{key}.lora_A.weight"] = a.reshape(N_EXPERT * rank, -1)
        tensors[f"{key}.lora_B.weight"] = b.reshape(b.shape[0], -1)
        equation = "ore,eri->eio" if swapped else "ore,eri->eoi"
        wanted[parameter] = 2 * np.einsum(equation, b.astype(np.float64), a.astype(np.float64))
    folder = peft(
        tmp_path / "peft",
        tensors,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    path, _ = convert(folder, base)
    found = deltas(path, base)
    gate, up = np.split(wanted["gate_up_proj"], 2, axis=1)
    np.testing.assert_allclose(found["blk.0.ffn_gate_exps.weight"], gate, atol=1e-4)
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], up, atol=1e-4)
    np.testing.assert_allclose(found["blk.0.ffn_down_exps.weight"], wanted["down_proj"], atol=1e-4)


def mlx(folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    """An adapter folder as mlx_lm.lora leaves it."""
    folder.mkdir()
    (folder / "adapters.safetensors").write_bytes(safetensors_bytes(tensors))
    fields: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def test_mlx_factors_are_turned_and_the_scale_is_direct(tmp_path: Path) -> None:
    """MLX keeps lora_a (n_in, rank) and lora_b (rank, n_out), and multiplies by its scale."""
    base = write_base(tmp_path / "base.gguf")
    module = "model.layers.0.self_attn.k_proj"
    a, b = normal(1, N_EMBD, 4), normal(2, 4, N_HEAD_KV * N_ROT)
    folder = mlx(tmp_path / "mlx", {f"{module}.lora_a": a, f"{module}.lora_b": b})
    path, plan = convert(folder, base)
    wanted = 10 * (a.astype(np.float64) @ b).T
    assert plan.config.source == "mlx"
    found = deltas(path, base)["blk.0.attn_k.weight"]
    np.testing.assert_allclose(found, permuted(wanted, N_HEAD_KV), atol=1e-4)


def test_mlx_experts_and_table(tmp_path: Path) -> None:
    """MLX's switch layers are stacks of experts; its table's adapter is the tied head's too."""
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True, tied=True)
    head = "model.layers.0.mlp.switch_mlp.up_proj"
    a, b = normal(1, N_EXPERT, 4, N_EMBD), normal(2, N_EXPERT, N_FF, 4)
    table_a, table_b = normal(3, N_VOCAB, 4), normal(4, 4, N_EMBD)
    tensors = {
        f"{head}.lora_a": a,
        f"{head}.lora_b": b,
        "model.embed_tokens.lora_a": table_a,
        "model.embed_tokens.lora_b": table_b,
    }
    path, plan = convert(mlx(tmp_path / "mlx", tensors), base)
    assert plan.tied_output is True
    found = deltas(path, base)
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], 10 * (b @ a), atol=1e-3)
    np.testing.assert_allclose(found["token_embd.weight"], 10 * (table_a @ table_b), atol=1e-3)


def test_a_trained_bias_goes_with_its_pair(tmp_path: Path) -> None:
    """bias = "all": the difference to the base's bias is carried, in the base's row order."""
    n_q = N_HEAD * N_ROT
    old = normal(7, n_q)
    base = write_base(tmp_path / "base.gguf", extra={"blk.0.attn_q.bias": permuted(old, N_HEAD)})
    module = "model.layers.0.self_attn.q_proj"
    tensors = lora({module: (n_q, N_EMBD)})
    new = normal(8, n_q)
    tensors[f"base_model.model.{module}.base_layer.bias"] = new  # as PEFT names it
    path, plan = convert(peft(tmp_path / "peft", tensors, bias="all"), base)
    assert plan.own_keys == ("lora_bias",)
    stored = read_tensors(path)["blk.0.attn_q.weight.lora_bias"]
    scale = plan.alpha / 4
    np.testing.assert_allclose(stored * scale, permuted(new - old, N_HEAD), atol=1e-5)


def test_a_bias_that_was_not_trained_is_left_out_and_told(tmp_path: Path) -> None:
    """With bias = "none" a saved bias is the base's own."""
    base = write_base(tmp_path / "base.gguf")
    module = "model.layers.0.self_attn.q_proj"
    tensors = lora({module: (32, N_EMBD)})
    tensors[f"base_model.model.{module}.base_layer.bias"] = normal(1, 32)
    plan = plan_conversion(peft(tmp_path / "peft", tensors), base)
    assert plan.skipped == (f"base_model.model.{module}.base_layer.bias",)
    assert plan.own_keys == ()


def test_trained_tokens_are_a_pair_of_their_rank(tmp_path: Path) -> None:
    """Rows of the table that were trained replace the base's exactly."""
    base = write_base(tmp_path / "base.gguf")
    tensors = lora(layers(("self_attn.v_proj",)))
    rows = normal(5, 2, N_EMBD)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    folder = peft(tmp_path / "peft", {**tensors, name: rows}, trainable_token_indices=[3, 17])
    path, _ = convert(folder, base)
    table = read_tensors(base)["token_embd.weight"]
    wanted = table.astype(np.float64)
    wanted[[3, 17]] = rows
    np.testing.assert_allclose(deltas(path, base)["token_embd.weight"] + table, wanted, atol=1e-6)


def test_a_saved_table_that_was_not_trained_is_left_out_and_told(tmp_path: Path) -> None:
    """PEFT saves the table beside a pair of its: it is skipped, with a warning."""
    base = write_base(tmp_path / "base.gguf")
    tensors = lora(layers())
    tensors["base_model.model.model.embed_tokens.weight"] = normal(1, N_VOCAB, N_EMBD)
    plan = plan_conversion(peft(tmp_path / "peft", tensors), base)
    assert plan.skipped == ("base_model.model.model.embed_tokens.weight",)
    assert "saved but not trained" in " ".join(plan.warnings)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_repeated_by_peft(tied: bool, tmp_path: Path) -> None:
    """layer_replication fits a base with as many layers, and no other."""
    base = write_base(tmp_path / "base.gguf", tied=tied)
    plan = plan_conversion(peft(tmp_path / "a", layer_replication=[[0, 1], [0, 1]]), base)
    assert len(plan.targets) == 4
    with pytest.raises(AdapterMismatchError, match="model of 3 layers, the base has 2"):
        plan_conversion(peft(tmp_path / "b", layer_replication=[[0, 2], [1, 2]]), base)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
QA, QB = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
PAIR = {QA: normal(0, 4, N_EMBD), QB: normal(1, N_HEAD * N_ROT, 4)}
NORM = "base_model.model.model.layers.0.input_layernorm.weight"
REFUSED: dict[str, tuple[type[LoragraphError], str, dict[str, Any], dict[str, Any]]] = {
    "half": (AdapterFormatError, "lora_A is there, lora_B is missing", {QA: PAIR[QA]}, {}),
    "other half": (AdapterFormatError, "lora_B is there, lora_A is missing", {QB: PAIR[QB]}, {}),
    "no tensors": (AdapterFormatError, "holds no tensor", {}, {}),
    "unlike ranks": (AdapterFormatError, "rank 4, lora_B 5", {**PAIR, QB: normal(1, 32, 5)}, {}),
    "rank of the config": (AdapterFormatError, "says rank 8, lora_A has 4", PAIR, {"r": 8}),
    "hidden size": (
        AdapterMismatchError,
        "weight of 64 by 32, the base's blk.0.attn_q.weight is 32 by 32",
        {**PAIR, QA: normal(0, 4, 64)},
        {},
    ),
    "rows": (
        AdapterMismatchError,
        "weight of 32 by 48",
        {**PAIR, QB: normal(1, 48, 4)},
        {},
    ),
    "layers": (
        AdapterMismatchError,
        "the base has 2 layers, the adapter changes layer 7",
        lora({"model.layers.7.self_attn.q_proj": (32, 32)}),
        {},
    ),
    "unknown module": (
        AdapterMismatchError,
        "has no tensor for it",
        lora({"model.layers.0.mixer.in_proj": (32, 32)}),
        {},
    ),
    "module the base lacks": (
        AdapterMismatchError,
        "(lacks the tensor|has no tensor)",
        lora({"model.layers.0.mlp.shared_expert.up_proj": (48, 32)}),
        {},
    ),
    "NaN": (AdapterFormatError, "finite values", {**PAIR, QB: np.full((32, 4), np.nan, "f4")}, {}),
    "infinity": (AdapterFormatError, "finite", {**PAIR, QA: np.full((4, 32), np.inf, "f4")}, {}),
    "empty shard": (
        AdapterFormatError,
        "before its shards were gathered",
        {**PAIR, QA: np.zeros((0, 32), "f4")},
        {},
    ),
    "diffusion": (
        UnsupportedError,
        "a diffusion model",
        {"lora_unet_down_blocks_0.lora_down.weight": normal(0, 4, 4)},
        {},
    ),
    "diffusers": (
        UnsupportedError,
        "a diffusion model",
        {"unet.down_blocks.0.attn.to_q.lora_A.weight": normal(0, 4, 4)},
        {},
    ),
    "vision": (
        UnsupportedError,
        "the vision part",
        {"base_model.model.visual.blocks.0.attn.qkv.lora_A.weight": normal(0, 4, 4)},
        {},
    ),
    "LoHa factors": (UnsupportedError, "LoHa factors", {f"{Q}.hada_w1_a": normal(0, 4, 4)}, {}),
    "unknown part": (UnsupportedError, "no part of a LoRA", {f"{Q}.mystery": normal(0, 4)}, {}),
    "two adapters": (
        UnsupportedError,
        "several adapters: a, b",
        {**lora(layers(n=1), infix=".a"), **lora(layers(("mlp.up_proj",), 1), infix=".b")},
        {},
    ),
    "norm": (
        UnsupportedError,
        "a low-rank part cannot change",
        {**PAIR, NORM: normal(0, N_EMBD)},
        {"modules_to_save": ["input_layernorm"]},
    ),
    "classifier": (
        UnsupportedError,
        "no such weight.*classification head",
        {**PAIR, "base_model.model.score.weight": normal(0, 2, N_EMBD)},
        {"modules_to_save": ["score"]},
    ),
    "bias alone": (
        UnsupportedError,
        "no low-rank pair to carry it",
        {**PAIR, "base_model.model.model.layers.1.self_attn.q_proj.bias": normal(0, 32)},
        {"bias": "all"},
    ),
    "resized table": (
        AdapterMismatchError,
        "added tokens",
        {**PAIR, "base_model.model.model.embed_tokens.weight": normal(0, N_VOCAB + 2, N_EMBD)},
        {"modules_to_save": ["embed_tokens"]},
    ),
    "alpha 0": (AdapterFormatError, "would change nothing", PAIR, {"lora_alpha": 0}),
    "no alpha": (AdapterFormatError, "lora_alpha: expected a finite", PAIR, {"lora_alpha": None}),
    "alpha text": (AdapterFormatError, "expected a finite number", PAIR, {"lora_alpha": "16"}),
    "rank 0": (AdapterFormatError, "r: expected an integer", PAIR, {"r": 0}),
    "rank 2.5": (AdapterFormatError, "r: expected an integer", PAIR, {"r": 2.5}),
    "rsLoRA text": (AdapterFormatError, "true or false", PAIR, {"use_rslora": "yes"}),
    "qalora": (UnsupportedError, "use_qalora", PAIR, {"use_qalora": True}),
    "arrow": (UnsupportedError, "arrow_config", PAIR, {"arrow_config": {"top_k": 3}}),
    "kasa": (UnsupportedError, "kasa_config", PAIR, {"kasa_config": {"beta": 1}}),
    "monteclora": (UnsupportedError, "samples", PAIR, {"monteclora_config": {"num_samples": 1}}),
    "pissa": (
        UnsupportedError,
        "changed the weights of the base.*path_initial_model",
        PAIR,
        {"init_lora_weights": "pissa_niter_16"},
    ),
    "invocation text": (
        UnsupportedError,
        "alora_invocation_tokens",
        PAIR,
        {"invocation_string": "<|x|>"},
    ),
    "invocation range": (
        AdapterMismatchError,
        "the base has 40 tokens, got 99",
        PAIR,
        {"alora_invocation_tokens": [99]},
    ),
    "slow pattern": (
        AdapterFormatError,
        "takes too long",
        PAIR,
        {"alpha_pattern": {r"(.+)(.+)(.+)(.+)(.+)(.+)(.+)(.+)\8\7\6": 3}},
    ),
    "no pattern": (AdapterFormatError, "no regular expression", PAIR, {"alpha_pattern": {"(": 3}}),
    "pattern text": (AdapterFormatError, "finite number", PAIR, {"alpha_pattern": {"q_proj": "x"}}),
    "VeRA": (UnsupportedError, "VERA.*random projections", PAIR, {"peft_type": "VERA"}),
    "unknown type": (UnsupportedError, "peft_type is OFT", PAIR, {"peft_type": "OFT"}),
    "not PEFT": (AdapterFormatError, "neither peft_type", PAIR, {"peft_type": None, "r": None}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_one_clear_sentence(name: str, tmp_path: Path) -> None:
    """The class of the error and the reason, and no file is left behind."""
    kind, message, tensors, config = REFUSED[name]
    base = write_base(tmp_path / "base.gguf")
    folder = peft(tmp_path / "peft", tensors, **config)
    if name == "not PEFT":
        (folder / "adapter_config.json").write_text('{"type": "act", "n_obs_steps": 1}')
    with pytest.raises(kind, match=message) as error:
        convert(folder, base, tmp_path / "out.gguf")
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "peft"]


def test_an_unsupported_family_is_named(tmp_path: Path) -> None:
    """A base whose rows nobody looked at is refused."""
    base = write_base(tmp_path / "base.gguf", "bloom")
    with pytest.raises(UnsupportedError, match=r"architecture 'bloom'.*supported: chatglm"):
        plan_conversion(peft(tmp_path / "peft"), base)


def test_an_adapter_as_base_is_refused(tmp_path: Path) -> None:
    """The two files in the wrong places are told apart."""
    base = write_base(tmp_path / "base.gguf")
    path, _ = convert(peft(tmp_path / "peft"), base)
    with pytest.raises(LoragraphError, match="expected a base model"):
        plan_conversion(tmp_path / "peft", path)
    with pytest.raises(ConfigError, match="is a GGUF file already"):
        plan_conversion(path, base)


def test_another_model_of_the_same_shape_is_told(tmp_path: Path) -> None:
    """Names that cannot mean one model give a warning: shapes alone cannot tell."""
    base = write_base(tmp_path / "base.gguf", name="Qwen2.5 Coder 1.5B Instruct")
    folder = peft(tmp_path / "peft", base_model_name_or_path="Qwen/Qwen2.5-Coder-1.5B")
    assert plan_conversion(folder, base).warnings == ()
    folder = peft(tmp_path / "peft", base_model_name_or_path="meta-llama/Llama-3.2-1B")
    (warning,) = plan_conversion(folder, base).warnings
    assert "trained on 'meta-llama/Llama-3.2-1B'" in warning
    assert "calls itself 'Qwen2.5 Coder 1.5B Instruct'" in warning


def test_unknown_fields_are_told(tmp_path: Path) -> None:
    """A field that nobody here knows is not passed over in silence."""
    folder = peft(tmp_path / "peft", use_next_idea={"x": 1}, other_idea=None)
    (warning,) = plan_conversion(folder, write_base(tmp_path / "base.gguf")).warnings
    assert "use_next_idea" in warning
    assert "other_idea" not in warning


def test_pickled_weights_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch a .bin is refused with what to do; nothing here unpickles."""
    folder = peft(tmp_path / "peft")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(UnsupportedError, match=r"torch alone.*safe_serialization"):
        plan_conversion(folder, write_base(tmp_path / "base.gguf"))


def test_sharded_weights_are_read_from_their_folder_alone(tmp_path: Path) -> None:
    """An index names the parts; a name with a path in it is refused."""
    base = write_base(tmp_path / "base.gguf")
    folder = peft(tmp_path / "peft")
    (folder / "adapter_model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    assert len(plan_conversion(folder, base).targets) == 4
    index.write_text(json.dumps({"weight_map": {"a": "../peft/part-1.safetensors"}}))
    with pytest.raises(AdapterFormatError, match="files in this folder"):
        plan_conversion(folder, base)


def test_a_missing_file_says_where_to_look(tmp_path: Path) -> None:
    """A folder of adapters, an empty folder and no folder are told apart."""
    base = write_base(tmp_path / "base.gguf")
    peft(tmp_path / "all" / "sql")
    with pytest.raises(AdapterFormatError, match="adapters in its folders sql"):
        plan_conversion(tmp_path / "all", base)
    with pytest.raises(AdapterFormatError, match="no such file or folder"):
        plan_conversion(tmp_path / "nothing", base)
    (tmp_path / "all" / "sql" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match="expected the weights beside"):
        plan_conversion(tmp_path / "all" / "sql", base)


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    """A value that the wanted type cannot hold is an error, not an infinity."""
    base = write_base(tmp_path / "base.gguf")
    tensors = dict(PAIR) | {QB: np.full((32, 4), 1e5, "f4")}
    folder = peft(tmp_path / "peft", tensors)
    with pytest.raises(AdapterFormatError, match=r"leaves the range.*f32 or bf16"):
        convert(folder, base, outtype="f16")
    convert(folder, base, outtype="bf16")


def test_q8_0_falls_back_where_a_row_is_too_short(tmp_path: Path) -> None:
    """lora_a is Q8_0, lora_b, whose rows have the rank's length, is F16."""
    base = write_base(tmp_path / "base.gguf")
    path, _ = convert(peft(tmp_path / "peft"), base, outtype="q8_0")
    with read_adapter(load_library(None), path, None) as adapter:
        assert {(pair.a.type, pair.b.type) for pair in adapter.pairs.values()} == {(8, 1)}


def test_the_output_is_a_file_that_was_not_there_before(tmp_path: Path) -> None:
    """A folder, a missing folder and a type that is none are configuration errors."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "peft")
    with pytest.raises(ConfigError, match="got the folder"):
        convert(folder, base, tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        convert(folder, base, tmp_path / "x" / "y.gguf")
    with pytest.raises(ConfigError, match="expected f32, f16, bf16, q8_0"):
        convert(folder, base, outtype="q4_0")  # type: ignore[arg-type]
    path, _ = convert(folder, base, tmp_path / "a.gguf", dry_run=True)
    assert not path.exists()
    convert(folder, base, path)
    assert os.stat(path).st_mode & 0o400


@pytest.mark.parametrize("module", MODULES)
def test_rslora_is_alpha_over_the_root_of_the_rank(module: str, tmp_path: Path) -> None:
    """Every module's effective scale with use_rslora."""
    base = write_base(tmp_path / "base.gguf", "qwen2")
    tensors = lora(layers((module,), 1))
    path, _ = convert(peft(tmp_path / "peft", tensors, use_rslora=True), base)
    (found,) = deltas(path, base).values()
    wanted = product(tensors, f"model.layers.0.{module}", 8 / 2)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
