"""Adapters that mlx-lm makes of the tiny bases of train_variants.py, and MLX's own logits.

Development only, with mlx and mlx-lm (on Linux: `pip install "mlx[cpu]" mlx-lm gguf`):
`python demos/train_mlx.py` writes tests/golden/mlx_variants/. The adapters are made by mlx-lm's
linear_to_lora_layers, trained for a few steps and saved as `mlx_lm.lora` saves them; the logits are
float64 arithmetic, of experts float32 (MLX gathers matrices in no other type), stored as float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from golden_io import MAGIC, VERSION
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
BASES, OUT = GOLDEN / "peft_variants", GOLDEN / "mlx_variants"
PROMPTS = ([5, 9, 70, 33, 101, 64, 12, 90], [17, 80, 80, 3, 127, 45])
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Variant:
    base: str
    num_layers: int
    parameters: Mapping[str, Any]  # lora_parameters
    kind: str = "lora"


VARIANTS = {
    # The last layer alone, as mlx-lm chooses layers, and every linear weight of it.
    "lora": Variant("untied", 1, {"rank": 3, "dropout": 0.0, "scale": 2.5}),
    "dora": Variant(
        "untied",
        2,
        {"rank": 2, "dropout": 0.0, "scale": 4.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]},
        "dora",
    ),
    # A table that is the head too: mlx-lm applies its adapter in both places.
    "tied": Variant(
        "tied",
        2,
        {
            "rank": 2,
            "dropout": 0.0,
            "scale": 1.5,
            "keys": ["self_attn.v_proj", "model.embed_tokens"],
        },
    ),
    "experts": Variant(
        "qwen3moe_packed",
        1,
        {
            "rank": 2,
            "dropout": 0.0,
            "scale": 2.0,
            "keys": ["self_attn.q_proj", "mlp.gate", *(n for n in NAMES.values() if "switch" in n)],
        },
    ),
}  # fmt: skip


def load(path: Path) -> nn.Module:
    """A base of ours as mlx-lm's model, float32."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    arch = keys["general.architecture"]
    shape = {
        "model_type": arch,
        "hidden_size": keys[f"{arch}.embedding_length"],
        "num_hidden_layers": keys[f"{arch}.block_count"],
        "intermediate_size": keys[f"{arch}.feed_forward_length"],
        "num_attention_heads": keys[f"{arch}.attention.head_count"],
        "num_key_value_heads": keys[f"{arch}.attention.head_count_kv"],
        "rms_norm_eps": keys[f"{arch}.attention.layer_norm_rms_epsilon"],
        "vocab_size": keys[f"{arch}.vocab_size"],
        "max_position_embeddings": 128,
        "rope_theta": keys[f"{arch}.rope.freq_base"],
        "tie_word_embeddings": all(one.name != "output.weight" for one in reader.tensors),
    }
    if arch == "llama":
        model = llama.Model(llama.ModelArgs(**shape))
    else:
        model = qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                **shape,
                head_dim=keys[f"{arch}.attention.key_length"],
                num_experts=keys[f"{arch}.expert_count"],
                num_experts_per_tok=keys[f"{arch}.expert_used_count"],
                moe_intermediate_size=keys[f"{arch}.expert_feed_forward_length"],
                decoder_sparse_step=1,
                mlp_only_layers=[],
                norm_topk_prob=True,
            )
        )
    n_head = {"attn_q": shape["num_attention_heads"], "attn_k": shape["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values, name = np.array(tensor.data, np.float32), tensor.name
        if name in ENDS:
            weights[ENDS[name]] = mx.array(values)
            continue
        _, il, part, _ = name.split(".")
        if arch == "llama" and part in n_head:  # pairs of a rotation side by side
            pairs = values.reshape(n_head[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[f"model.layers.{il}.{NAMES[part]}.weight"] = mx.array(values)
    model.load_weights(list(weights.items()), strict=True)
    return model


def train(model: nn.Module, variant: Variant, seed: int) -> None:
    """mlx-lm's layers, every factor at random, and a few steps."""
    model.freeze()
    linear_to_lora_layers(
        model, variant.num_layers, dict(variant.parameters), use_dora=variant.kind == "dora"
    )
    rng = np.random.default_rng(seed)
    drawn = [
        (name, mx.array((0.15 * rng.standard_normal(value.shape)).astype(np.float32)))
        for name, value in tree_flatten(model.trainable_parameters())
        if name.endswith(("lora_a", "lora_b"))
    ]
    model.update(tree_unflatten(drawn))
    optimiser = optim.Adam(learning_rate=1e-2)

    def loss(ids: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    for _ in range(10):
        _, gradients = step(mx.array(rng.integers(0, 128, (4, 12))))
        optimiser.update(model, gradients)
        mx.eval(model.parameters(), optimiser.state)


def save(model: nn.Module, variant: Variant, folder: Path) -> None:
    """The two files of `mlx_lm.lora`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trained = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)
    config = {
        "fine_tune_type": variant.kind,
        "num_layers": variant.num_layers,
        "lora_parameters": dict(variant.parameters),
        "model": "",
        "adapter_path": "adapters",
        "train": True,
        "iters": 10,
    }
    save_config(config, folder / "adapter_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for seed, (name, variant) in enumerate(VARIANTS.items(), 500):
        model = load(BASES / f"{variant.base}.gguf")
        train(model, variant, seed)
        save(model, variant, args.out / name)
        if name != "experts":
            model.set_dtype(mx.float64)
        logits = {
            f"logits{i}": np.array(model(mx.array([prompt]))[0]).astype(np.float32)
            for i, prompt in enumerate(PROMPTS)
        }
        np.savez_compressed(args.out / f"{name}.npz", **logits)
        print(name, flush=True)
    about = {
        "magic": MAGIC,
        "version": VERSION,
        "made_by": "python demos/train_mlx.py",
        "arithmetic": "float64, experts in float32 (mlx and mlx-lm on the CPU)",
        "logits": "<variant>.npz, logits<prompt index>: (n_tokens, n_vocab) f32",
        "variants": {
            name: {"base": f"{variant.base}.gguf", "prompts": [list(p) for p in PROMPTS]}
            for name, variant in VARIANTS.items()
        },
    }
    (args.out / "mlx.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
