"""Tiny llamas, adapters of every kind that PEFT trains on them, and PEFT's logits.

Development only: `python demos/train_variants.py` writes tests/golden/peft_variants/. Each adapter
is trained for a few steps (so that no factor is zero) and saved by PEFT itself; the logits are
float64 arithmetic, stored as float32. These files are the oracle of `loragraph convert`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_io import MAGIC, VERSION
from golden_tiny import PROMPTS, SEVEN, TinyBase, build, to_float64, write_base
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model

OUT = Path(__file__).parent.parent / "tests" / "golden" / "peft_variants"
BASES = {
    "untied": TinyBase(31, 2, 32, 4, 2, 48, False, {}, []),
    "tied": TinyBase(32, 2, 32, 4, 2, 48, True, {}, []),
}
INVOCATION = [7, 41]
INVOKING = (
    [5, 9, 70, 33, 7, 41, 64, 12, 90],
    [7, 41, 7, 41, 3, 127, 45, 12, 7, 99],
    [17, 80, 80, 3, 127, 45],
)
"""Prompts with the invocation inside, twice (the last counts), and not at all."""


@dataclass(frozen=True)
class Variant:
    base: str
    config: Mapping[str, Any]
    prompts: tuple[list[int], ...] = PROMPTS
    n_steps: int = 20
    kind: str = "lora"


VARIANTS = {
    "plain": Variant("untied", {"r": 4, "lora_alpha": 8, "target_modules": SEVEN}),
    "rslora": Variant(
        "untied", {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": SEVEN}
    ),
    "patterns": Variant(
        "untied",
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": SEVEN,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 3, "v_proj": 5},
            "alpha_pattern": {r".*\.0\.self_attn\.k_proj": 9, "v_proj": 2.5, "mlp.up_proj": 7},
        },
    ),
    "rslora_patterns": Variant(
        "untied",
        {
            "r": 3,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": ["q_proj", "o_proj", "up_proj"],
            "rank_pattern": {"layers.1.self_attn.o_proj": 6},
            "alpha_pattern": {"up_proj": 1},
        },
    ),
    "head": Variant(
        "untied", {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "embed_tokens", "lm_head"]}
    ),
    "alora": Variant(
        "untied",
        {"r": 4, "lora_alpha": 8, "target_modules": SEVEN, "alora_invocation_tokens": INVOCATION},
        INVOKING,
    ),
    "lora_bias": Variant(
        "untied", {"r": 2, "lora_alpha": 5, "lora_bias": True, "target_modules": SEVEN}
    ),
    "regex": Variant(
        "untied",
        {"r": 3, "lora_alpha": 6, "target_modules": r".*layers\.0\.self_attn\.(q|v)_proj"},
    ),
    "layers": Variant(
        "untied",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "down_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
    ),
    "dora": Variant("untied", {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": SEVEN}),
    "dora_head": Variant(
        "untied",
        {
            "r": 2,
            "lora_alpha": 3,
            "use_dora": True,
            "use_rslora": True,
            "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        },
    ),
    "modules_to_save": Variant(
        "untied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "up_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
        },
    ),
    "tokens": Variant(
        "untied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["v_proj"],
            "trainable_token_indices": [3, 33, 127],
        },
    ),
    "tied_embed": Variant(
        "tied", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "embed_tokens"]}
    ),
    "tied_both": Variant(
        "tied",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "tied_head": Variant(
        "tied", {"r": 2, "lora_alpha": 6, "target_modules": ["v_proj", "lm_head"]}
    ),
    "tied_tokens": Variant(
        "tied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["v_proj"],
            "trainable_token_indices": [3, 33, 127],
        },
    ),
    "tied_save": Variant(
        "tied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["v_proj"],
            "modules_to_save": ["embed_tokens"],
        },
    ),
    "norms": Variant(
        "untied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "down_proj"],
            "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"],
        },
    ),
    "ln_tuning": Variant("tied", {"target_modules": ["input_layernorm", "norm"]}, kind="ln"),
}


def train(variant: Variant, seed: int) -> PeftModel:
    """A few steps of language modelling on random tokens: every factor moves from its start."""
    torch.manual_seed(seed)
    base = build(BASES[variant.base])
    config = LNTuningConfig if variant.kind == "ln" else LoraConfig
    model = get_peft_model(base, config(task_type="CAUSAL_LM", **variant.config))
    for name, weight in model.named_parameters():
        if weight.requires_grad and ".lora_" in name and weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.15)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for _ in range(variant.n_steps):
        ids = torch.from_numpy(rng.integers(0, 128, (4, 12)))
        if "alora_invocation_tokens" in variant.config:
            ids[:, 3:5] = torch.tensor(INVOCATION)
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def save(model: PeftModel, folder: Path) -> None:
    """What PEFT itself writes, without the model card."""
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def logits_of(model: PeftModel, variant: Variant) -> dict[str, np.ndarray]:
    """PEFT's logits (n_tokens, n_vocab) of each prompt, computed in float64."""
    to_float64(model, BASES[variant.base])
    out = {}
    for i, prompt in enumerate(variant.prompts):
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert logits.dtype == torch.float64
        out[f"logits{i}"] = logits.numpy().astype(np.float32)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, base in BASES.items():
        write_base(args.out / f"{name}.gguf", build(base), base)
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        if args.names and name not in args.names:
            continue
        model = train(variant, 100 + seed)
        save(model, args.out / name)
        np.savez_compressed(args.out / f"{name}.npz", **logits_of(model, variant))
        print(name, flush=True)
    about = {
        "magic": MAGIC,
        "version": VERSION,
        "made_by": "python demos/train_variants.py",
        "arithmetic": "float64 (torch, transformers and PEFT), logits stored as float32",
        "logits": "<variant>.npz, logits<prompt index>: (n_tokens, n_vocab) f32",
        "variants": {
            name: {"base": f"{variant.base}.gguf", "prompts": [list(p) for p in variant.prompts]}
            for name, variant in VARIANTS.items()
        },
    }
    (args.out / "variants.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
