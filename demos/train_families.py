"""Tiny models of other families, adapters that PEFT trains on them, and PEFT's logits.

Development only: `python demos/train_families.py` adds to tests/golden/peft_variants/ what
train_variants.py cannot show on a llama: trained biases of the base (qwen2), also of modules
without a low-rank pair, reordered rows beside factors of the family's own (granite), packed experts
(qwen3moe), norms of q and k (qwen3), norms whose weight is stored without its one (gemma3). Model
and adapter compute in float64, but for norms, rotations and the router, which transformers does in
float32, and for GELU, which ggml looks up by half floats: its difference would hide any other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from base_model import NORMS, PROJECTIONS, permute_rows
from golden_io import MAGIC, VERSION
from golden_tiny import EPS, PROMPTS, vocabulary
from peft import LoraConfig, get_peft_model
from train_variants import OUT, save
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

N_EMBD, N_HEAD, N_HEAD_KV, N_ROT, N_FF, N_VOCAB = 16, 2, 1, 8, 32, 128
N_EXPERT, N_USED, N_FF_EXPERT = 4, 2, 24
SHAPE: Mapping[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_hidden_layers": 1,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_HEAD_KV,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
SEVEN = [name.split(".")[-1] for name in PROJECTIONS.values()]
GRANITE = {"embedding": 3.0, "residual": 0.7, "attention": 0.2, "logits": 1.5}


@dataclass(frozen=True)
class Family:
    arch: str
    config: Any
    adapter: Mapping[str, Any]
    keys: Mapping[str, int | float] = field(default_factory=dict)  # beside the common ones
    base: str = ""  # of another one here


FAMILIES = {
    "qwen2_bias": Family(
        "qwen2",
        Qwen2Config(**SHAPE),
        {"r": 2, "lora_alpha": 3, "bias": "all", "target_modules": SEVEN},
    ),
    "granite": Family(
        "granite",
        GraniteConfig(
            **SHAPE,
            embedding_multiplier=GRANITE["embedding"],
            residual_multiplier=GRANITE["residual"],
            attention_multiplier=GRANITE["attention"],
            logits_scaling=GRANITE["logits"],
        ),
        {"r": 2, "lora_alpha": 3, "target_modules": [*SEVEN, "embed_tokens", "lm_head"]},
        {
            "embedding_scale": GRANITE["embedding"],
            "residual_scale": GRANITE["residual"],
            "attention.scale": GRANITE["attention"],
            "logit_scale": GRANITE["logits"],
        },
    ),
    "qwen3moe_packed": Family(
        "qwen3moe",
        Qwen3MoeConfig(
            **SHAPE, head_dim=N_ROT, num_experts=N_EXPERT, num_experts_per_tok=N_USED,
            moe_intermediate_size=N_FF_EXPERT, norm_topk_prob=True, mlp_only_layers=[],
        ),
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "alpha_pattern": {"mlp.experts.down_proj": 5},
        },
        {
            "expert_count": N_EXPERT,
            "expert_used_count": N_USED,
            "expert_feed_forward_length": N_FF_EXPERT,
            "attention.key_length": N_ROT,
            "attention.value_length": N_ROT,
        },
    ),
    "qwen2_bias_alone": Family(
        "qwen2",
        Qwen2Config(**SHAPE),
        {"r": 2, "lora_alpha": 3, "bias": "all", "target_modules": ["q_proj", "down_proj"]},
        base="qwen2_bias",
    ),
    "qwen3_norms": Family(
        "qwen3",
        Qwen3Config(**SHAPE, head_dim=N_ROT),
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["v_proj"],
            "modules_to_save": ["q_norm", "k_norm", "post_attention_layernorm"],
        },
        {"attention.key_length": N_ROT, "attention.value_length": N_ROT},
    ),
    "gemma3_norms": Family(
        "gemma3",
        Gemma3TextConfig(
            **{name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"
               and not name.startswith(("rope", "experts"))},
            head_dim=N_ROT, query_pre_attn_scalar=N_ROT, sliding_window=4,
        ),
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["o_proj"],
            "modules_to_save": ["norm", "layernorm"],  # all: names are compared by their end
        },
        {
            "attention.key_length": N_ROT,
            "attention.value_length": N_ROT,
            "attention.sliding_window": 4,
            "rope.freq_base_swa": 10000.0,
        },
    ),
}  # fmt: skip
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def build(family: Family, seed: int) -> torch.nn.Module:
    """Random float32 weights, large enough that every part does something."""
    model = AutoModelForCausalLM.from_config(family.config).eval().requires_grad_(False)
    rng = np.random.default_rng(seed)
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        value = rng.standard_normal(shape) * (0.2 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1]))
        if len(shape) == 1 and name.endswith("norm.weight") and family.arch != "gemma3":
            value += 1  # gemma adds it itself
        if "embed_tokens" in name:
            value = rng.standard_normal(shape) * 0.5
        weight.data = torch.from_numpy(value.astype(np.float32))
    return model


def gguf_weights(family: Family, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The state under the names and in the row order of the family's GGUF files."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "token_embd.weight": state.pop("model.embed_tokens.weight"),
        "output_norm.weight": state.pop("model.norm.weight"),
        "output.weight": state.pop("lm_head.weight"),
    }
    if family.config.tie_word_embeddings:
        del out["output.weight"]
    names = PROJECTIONS | (NORMS | GEMMA_NORMS if family.arch == "gemma3" else NORMS) | {
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "ffn_gate_inp": "mlp.gate",
    }  # fmt: skip
    n_head = {"attn_q": N_HEAD, "attn_k": N_HEAD_KV} if family.arch == "granite" else {}
    for ours, theirs in names.items():
        for suffix in ("weight", "bias"):
            value = state.pop(f"model.layers.0.{theirs}.{suffix}", None)
            if value is not None:
                heads = n_head.get(ours)
                out[f"blk.0.{ours}.{suffix}"] = permute_rows(value, heads) if heads else value
    if family.arch == "gemma3":
        out = {name: value + 1 if "norm" in name else value for name, value in out.items()}
    packed = state.pop("model.layers.0.mlp.experts.gate_up_proj", None)
    if packed is not None:
        gate, up = np.split(packed, 2, axis=1)
        out["blk.0.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
        out["blk.0.ffn_up_exps.weight"] = np.ascontiguousarray(up)
        out["blk.0.ffn_down_exps.weight"] = state.pop("model.layers.0.mlp.experts.down_proj")
    if state:
        raise SystemExit(f"expected every weight to have a place, left {sorted(state)}")
    return out


def write_base(path: Path, family: Family, model: torch.nn.Module) -> None:
    """The model as GGUF in F32."""
    writer = gguf.GGUFWriter(path, family.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"tiny random {family.arch}")
    writer.add_context_length(128)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(N_ROT)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(N_VOCAB)
    for key, value in family.keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{family.arch}.{key}", value)
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    for name, weight in gguf_weights(family, model).items():
        writer.add_tensor(name, np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def train(model: torch.nn.Module, family: Family, seed: int) -> Any:
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **family.adapter))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad and ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.15)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-2, weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        ids = torch.from_numpy(rng.integers(0, N_VOCAB, (4, 12)))
        loss = adapted(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return adapted.eval()


class HalfGelu(torch.nn.Module):
    """GELU (tanh) of x rounded to float16, rounded to float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(x.half().double(), approximate="tanh")
        return y.half().to(x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed, (name, family) in enumerate(FAMILIES.items(), 300):
        if args.names and name not in args.names:
            continue
        model = build(family, 300 + [*FAMILIES].index(family.base or name))
        if not family.base:
            write_base(args.out / f"{name}.gguf", family, model)
        adapted = train(model, family, seed)
        save(adapted, args.out / name)
        adapted = adapted.double()
        if family.arch == "gemma3":
            for layer in adapted.get_base_model().model.layers:
                layer.mlp.act_fn = HalfGelu()
        with torch.no_grad():
            logits = {
                f"logits{i}": adapted(input_ids=torch.tensor([p])).logits[0].float().numpy()
                for i, p in enumerate(PROMPTS)
            }
        np.savez_compressed(args.out / f"{name}.npz", **logits)
        print(name, flush=True)
    about = {
        "magic": MAGIC,
        "version": VERSION,
        "made_by": "python demos/train_families.py",
        "arithmetic": "float64 but for norms, rotations and the router, which are float32, and "
        "gemma's GELU, of float16 as ggml's",
        "logits": "<variant>.npz, logits<prompt index>: (n_tokens, n_vocab) f32",
        "variants": {
            name: {
                "base": f"{family.base or name}.gguf",
                "arch": family.arch,
                "prompts": [*map(list, PROMPTS)],
            }
            for name, family in FAMILIES.items()
        },
    }
    (args.out / "families.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
