"""What cannot be converted: the class of the error, the reason, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph import LoragraphError, convert
from loragraph.adapters.convert import plan_conversion
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    ConfigError,
    UnsupportedError,
)
from tests.adapters.convert.folders import (
    N_EMBD,
    N_HEAD,
    N_ROT,
    N_VOCAB,
    layers,
    lora,
    normal,
    peft,
    write_base,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"
QA, QB = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
PAIR = {QA: normal(0, 4, N_EMBD), QB: normal(1, N_HEAD * N_ROT, 4)}
NORM = "base_model.model.model.layers.0.input_layernorm.weight"
HEAD = normal(9, N_VOCAB, N_EMBD)
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
    "bias of lora_B": (
        AdapterFormatError,
        "expected a bias of lora_B",
        PAIR,
        {"lora_bias": True},
    ),
    "bias that nobody trained": (
        AdapterFormatError,
        "expected no bias of lora_B",
        {**PAIR, f"{Q}.lora_B.bias": normal(0, 32)},
        {},
    ),
    "two ways": (
        UnsupportedError,
        "several ways: lora, weights",
        {**lora({"lm_head": (N_VOCAB, N_EMBD)}), "base_model.model.lm_head.weight": HEAD},
        {"modules_to_save": ["lm_head"]},
    ),
    "escape sequence": (
        AdapterFormatError,
        "printable",
        PAIR,
        {"base_model_name_or_path": "a\x1b[31m"},
    ),
    "norm of another size": (
        AdapterMismatchError,
        rf"input_layernorm.*shape \[5\].*attn_norm.weight \[{N_EMBD}\]",
        {**PAIR, NORM: normal(0, 5)},
        {"modules_to_save": ["input_layernorm"]},
    ),
    "norm with a bias": (
        UnsupportedError,
        "a bias of the norm was trained",
        {**PAIR, NORM: normal(0, N_EMBD), NORM.replace("weight", "bias"): normal(1, N_EMBD)},
        {"modules_to_save": ["input_layernorm"]},
    ),
    "classifier": (
        UnsupportedError,
        "no such weight.*classification head",
        {**PAIR, "base_model.model.score.weight": normal(0, 2, N_EMBD)},
        {"modules_to_save": ["score"]},
    ),
    "bias alone of another size": (
        AdapterMismatchError,
        r"bias has the shape \[31\], and the base has 32 rows in blk.1.attn_q.weight",
        {**PAIR, "base_model.model.model.layers.1.self_attn.q_proj.bias": normal(0, 31)},
        {"bias": "all"},
    ),
    "bias of a norm alone": (
        UnsupportedError,
        "biases are carried for linear weights alone",
        {**PAIR, NORM.replace("weight", "bias"): normal(0, N_EMBD)},
        {"bias": "all"},
    ),
    "bias of what the base lacks": (
        AdapterMismatchError,
        "score: the base .* has no tensor for it",
        {**PAIR, "base_model.model.score.bias": normal(0, 2)},
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
