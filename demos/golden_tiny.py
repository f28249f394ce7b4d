"""Tiny random llamas, PEFT adapters on them, and PEFT's logits -> tests/golden/tiny_peft/.

Development only: `python demos/golden_tiny.py`. These files are the oracle of exact mode: F32
weights, float64 arithmetic (norms and rotary embedding included, which transformers itself would
round to float32), logits stored as float32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from adapter_file import Header, write_adapter
from base_model import NORMS, PROJECTIONS, permute_rows
from golden_io import Case, applied, write_golden
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

OUT = Path(__file__).parent.parent / "tests" / "golden" / "tiny_peft"
PROMPTS = (
    [5, 9, 70, 33, 101, 2, 64],
    [17, 80, 80, 3, 127, 45, 12, 99, 0, 60, 41, 7, 23, 118, 90, 31, 4, 55, 76],
)
EPS = float(np.float32(1e-5))
SPECIAL = ["<|end|>", "<|start|>", "<|pad|>"]
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of")
SEVEN = [name.split(".")[-1] for name in PROJECTIONS.values()]


@dataclass(frozen=True)
class TinyAdapter:
    rank: int
    alpha: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class TinyBase:
    seed: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    tied: bool
    adapters: dict[str, TinyAdapter]
    cases: list[Case]


BASES = {
    "tied": TinyBase(
        11, 2, 64, 4, 2, 96, True,
        {
            "seven": TinyAdapter(4, 8.0, tuple(SEVEN)),
            "narrow": TinyAdapter(3, 5.0, ("q_proj", "v_proj", "down_proj")),
            "embed": TinyAdapter(2, 3.0, (*SEVEN, "embed_tokens")),
        },
        [
            Case("base", {}),
            Case("seven", {"seven": 1.0}),
            Case("narrow", {"narrow": 1.0}),
            Case("embed", {"embed": 1.0}),
            Case("seven_half", {"seven": 0.5}),
            Case("seven_narrow", {"seven": 1.0, "narrow": 0.4}),
            Case("seven_embed", {"seven": 0.7, "embed": -0.5}),
        ],
    ),
    "untied": TinyBase(
        12, 1, 32, 2, 1, 48, False,
        {"head": TinyAdapter(2, 6.0, ("q_proj", "k_proj", "embed_tokens", "lm_head"))},
        [Case("base", {}), Case("head", {"head": 1.0}), Case("head_half", {"head": 0.5})],
    ),
}  # fmt: skip


def vocabulary() -> tuple[list[str], list[str]]:
    """128 tokens and the merges of a byte-level BPE: control tokens, ASCII, a few pairs."""
    tokens = [*SPECIAL, *(chr(c) for c in range(33, 127)), "Ġ", "Ċ"]
    merges = []
    for pair in PAIRS:
        merges.append(f"{pair[0]} {pair[1]}")
        tokens.append(pair)
    for letter in "tasiwocb":
        merges.append(f"Ġ {letter}")
        tokens.append(f"Ġ{letter}")
    return tokens + [f"<|unused{i}|>" for i in range(128 - len(tokens))], merges


def build(base: TinyBase) -> LlamaForCausalLM:
    """A llama with random float32 weights, large enough that attention and gates do something."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=base.n_embd, intermediate_size=base.n_ff,
        num_hidden_layers=base.n_layer, num_attention_heads=base.n_head,
        num_key_value_heads=base.n_head_kv, max_position_embeddings=128, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=base.tied, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    rng = np.random.default_rng(base.seed)
    for name, weight in model.named_parameters():
        shape = tuple(weight.shape)
        scale = 0.2 if len(shape) == 1 else 1.5 / np.sqrt(shape[1])
        value = rng.standard_normal(shape) * scale + (len(shape) == 1)
        if "embed_tokens" in name:
            value = rng.standard_normal(shape) * 0.5
        weight.data = torch.from_numpy(value.astype(np.float32))
    return model


def write_base(path: Path, model: LlamaForCausalLM, base: TinyBase) -> None:
    """The same weights as a GGUF in F32 that libllama loads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"tiny random llama, {path.stem}")
    writer.add_context_length(128)
    writer.add_embedding_length(base.n_embd)
    writer.add_block_count(base.n_layer)
    writer.add_feed_forward_length(base.n_ff)
    writer.add_head_count(base.n_head)
    writer.add_head_count_kv(base.n_head_kv)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(base.n_embd // base.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(128)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tokens, merges = vocabulary()
    kinds = [
        gguf.TokenType.CONTROL if t.startswith("<|") else gguf.TokenType.NORMAL for t in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    for name, weight in gguf_weights(model, base).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_weights(model: LlamaForCausalLM, base: TinyBase) -> dict[str, np.ndarray]:
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not base.tied:
        out["output.weight"] = state["lm_head.weight"]
    n_head = {"attn_q": base.n_head, "attn_k": base.n_head_kv}
    for il in range(base.n_layer):
        for ours, theirs in (PROJECTIONS | NORMS).items():
            weight = state[f"model.layers.{il}.{theirs}.weight"]
            if ours in n_head:
                weight = permute_rows(weight, n_head[ours])
            out[f"blk.{il}.{ours}.weight"] = weight
    return out


class Norm(torch.nn.Module):
    """RMS norm in the dtype of its input; transformers' own goes through float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class Rotary(torch.nn.Module):
    """cos and sin (n_rows, n_tokens, n_rot) in the dtype of x, without a step through float32."""

    def __init__(self, n_rot: int) -> None:
        super().__init__()
        self.frequencies = 10000.0 ** (-torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = position_ids[..., None].to(torch.float64) * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def to_float64(model: PeftModel, base: TinyBase) -> PeftModel:
    causal = model.get_base_model()
    for layer in causal.model.layers:
        for name in NORMS.values():
            setattr(layer, name, Norm(_weight(getattr(layer, name))))
    causal.model.norm = Norm(_weight(causal.model.norm))
    causal.model.rotary_emb = Rotary(base.n_embd // base.n_head)
    return model.double()


def _weight(norm: torch.nn.Module) -> torch.nn.Parameter:
    """The weight that counts: the trained one where PEFT wraps the norm."""
    for name in ("modules_to_save", "ln_tuning_layers"):
        if hasattr(norm, name):
            norm = getattr(norm, name)["default"]
    weight = norm.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight


def add_adapters(model: LlamaForCausalLM, base: TinyBase) -> PeftModel:
    """Every adapter of `base`, with random float32 A and B of visible size."""
    peft: PeftModel | None = None
    for name, adapter in base.adapters.items():
        config = LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.modules)
        )
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=name)
        else:
            peft.add_adapter(name, config)
    assert peft is not None
    rng = np.random.default_rng(base.seed + 100)
    for name, weight in peft.named_parameters():
        if ".lora_" in name:
            weight.requires_grad_(False)
            value = rng.standard_normal(tuple(weight.shape)) * 0.12
            weight.data = torch.from_numpy(value.astype(np.float32))
    return peft


@torch.no_grad()
def write_all(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, base in BASES.items():
        model = build(base)
        write_base(out / f"{name}.gguf", model, base)
        peft = add_adapters(model, base)
        for adapter, recipe in base.adapters.items():
            header = Header(
                name=f"tiny {adapter}",
                alpha=recipe.alpha,
                task_name=adapter,
                description="random weights",
                base=f"tiny random llama, {name}",
                license="mit",
                tied_output=False if base.tied and "embed_tokens" in recipe.modules else None,
            )
            write_adapter(out / f"{name}_{adapter}.gguf", peft, adapter, header, np.float32)
        to_float64(peft, base)
        arrays: dict[str, np.ndarray] = {}
        for case in base.cases:
            with applied(peft, case.mix):
                for i, prompt in enumerate(PROMPTS):
                    logits = peft(input_ids=torch.tensor([prompt])).logits[0]
                    assert logits.dtype == torch.float64
                    arrays[f"{case.name}.logits{i}"] = logits.numpy().astype(np.float32)
        about = {
            "made_by": "python demos/golden_tiny.py",
            "arithmetic": "float64 (torch, transformers and PEFT), logits stored as float32",
            "base": f"{name}.gguf",
            "adapters": {a: f"{name}_{a}.gguf" for a in base.adapters},
            "prompts": [list(p) for p in PROMPTS],
            "logits": "<case>.logits<prompt index>: (n_tokens, n_vocab) f32, after every token",
        }
        write_golden(out, name, arrays, base.cases, about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_all(args.out)


if __name__ == "__main__":
    main()
