"""Tiny random models of the families beside llama, with their optional parts on and off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gguf_bytes import Array, Value
from tests.tiny import ATTENTION_TARGETS, TinyLlama, TinyModel


@dataclass(frozen=True)
class TinyQwen2(TinyModel):
    """Biases of q, k and v; the head may have one."""

    output_bias: bool = False

    arch = "qwen2"

    def block_biases(self) -> tuple[str, ...]:
        return self.qkv_biases()

    def own_vectors(self) -> dict[str, Array]:
        return {"output.bias": self.bias("output.bias", self.n_vocab)} if self.output_bias else {}


@dataclass(frozen=True)
class TinyQwen3(TinyModel):
    """Norms of q and k over each head, which is wider than n_embd / n_head."""

    head_dim: int = 32

    arch = "qwen3"

    def block_norms(self) -> dict[str, int]:
        heads = {"attn_q_norm": self.n_rot, "attn_k_norm": self.n_rot}
        return super().block_norms() | heads


@dataclass(frozen=True)
class TinyGemma(TinyModel):
    """Always tied; embeddings times sqrt(n_embd)."""

    tied: bool = True
    head_dim: int = 32

    arch = "gemma"

    def embedding_gain(self) -> float:
        return float(np.sqrt(self.n_embd))


@dataclass(frozen=True)
class TinyGemma2(TinyGemma):
    """Norms behind attention and feed-forward, soft caps low enough to bend, windows in turn."""

    n_swa: int = 16
    pattern: int | tuple[bool, ...] | None = None  # None: the family's own
    attention_softcap: float = 2.0
    logit_softcap: float = 3.0
    rope_base_swa: float = 0.0  # 0: no key

    arch = "gemma2"

    def block_norms(self) -> dict[str, int]:
        behind = {"post_attention_norm": self.n_embd, "post_ffw_norm": self.n_embd}
        return super().block_norms() | behind

    def own_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {"attention.sliding_window": self.n_swa}
        if self.attention_softcap:
            keys["attn_logit_softcapping"] = self.attention_softcap
        if self.logit_softcap:
            keys["final_logit_softcapping"] = self.logit_softcap
        if self.rope_base_swa:
            keys["rope.freq_base_swa"] = self.rope_base_swa
        if self.pattern is not None:
            pattern: Value = self.pattern if isinstance(self.pattern, int) else list(self.pattern)
            keys["attention.sliding_window_pattern"] = pattern
        return keys


@dataclass(frozen=True)
class TinyGemma3(TinyGemma2):
    """Gemma 2 with norms of q and k in place of the scores' cap; 0 as `n_swa`: no key."""

    n_layer: int = 3
    pattern: int | tuple[bool, ...] | None = 3
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    rope_base: float = 1e6

    arch = "gemma3"

    def block_norms(self) -> dict[str, int]:
        heads = {"attn_q_norm": self.n_rot, "attn_k_norm": self.n_rot}
        return super().block_norms() | heads

    def own_keys(self) -> dict[str, Value]:
        keys = super().own_keys()
        if not self.n_swa:
            del keys["attention.sliding_window"]
        return keys


@dataclass(frozen=True)
class TinyPhi3(TinyModel):
    """q, k and v in one matrix, gate and up in another."""

    fused_qkv: bool = True
    window: int = 0  # a key that llama.cpp reads and lays aside

    arch = "phi3"

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        shapes = super().block_matrices() | {"ffn_up": (2 * self.n_ff, self.n_embd)}
        del shapes["ffn_gate"]
        return shapes

    def block_biases(self) -> tuple[str, ...]:
        return self.qkv_biases() * self.attn_bias

    def own_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {}
        if self.window:
            keys["attention.sliding_window"] = self.window
        return keys


@dataclass(frozen=True)
class TinyGranite(TinyModel):
    """Scales of embeddings, residuals, attention and logits; positions may be left out."""

    embedding_scale: float = 3.0
    residual_scale: float = 0.5
    attention_scale: float = 0.2
    logit_scale: float = 2.0
    finetuned: bool | None = None  # False: no positions at all

    arch = "granite"

    def embedding_gain(self) -> float:
        return self.embedding_scale or 1.0

    def own_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {
            "embedding_scale": self.embedding_scale,
            "residual_scale": self.residual_scale,
            "attention.scale": self.attention_scale,
            "logit_scale": self.logit_scale,
        }
        keys = {name: value for name, value in keys.items() if value}
        return keys if self.finetuned is None else keys | {"rope.scaling.finetuned": self.finetuned}


@dataclass(frozen=True)
class TinySmolLM3(TinyModel):
    """The fourth of its layers has no positions."""

    n_layer: int = 5

    arch = "smollm3"


TINY_FAMILIES: Mapping[str, type[TinyModel]] = {
    family.arch: family
    for family in (
        TinyLlama,
        TinyQwen2,
        TinyQwen3,
        TinyGemma,
        TinyGemma2,
        TinyGemma3,
        TinyPhi3,
        TinyGranite,
        TinySmolLM3,
    )
}
"""Each family's tiny model; a test compares the names with the registry's."""

LONGROPE: dict[str, Any] = {
    "rope_scaling": "longrope",
    "long_factors": True,
    "rope_orig_ctx": 128,  # tests have room for 256
    "rope_factor": 0.0,  # none: the factors hold the stretch
}
"""longrope that its key names."""

VARIANTS: Mapping[str, TinyModel] = {
    "llama": TinyLlama(),
    "llama, fused": TinyLlama(fused_qkv=True, attn_bias=True, biases_apart=True),
    "llama, longrope": TinyLlama(**LONGROPE),
    "qwen2": TinyQwen2(),
    "qwen2, tied, yarn": TinyQwen2(tied=True, rope_scaling="yarn", vocab="bpe"),
    "qwen2, bias of the head": TinyQwen2(output_bias=True, n_head_kv=1),
    "qwen2, fused": TinyQwen2(fused_qkv=True),
    "qwen2, fused, biases apart": TinyQwen2(fused_qkv=True, biases_apart=True),
    "qwen2, factors": TinyQwen2(scales=ATTENTION_TARGETS),
    "qwen3": TinyQwen3(),
    "qwen3, tied, linear": TinyQwen3(tied=True, rope_scaling="linear", n_head=6, vocab="bpe"),
    "qwen3, fused, head of 16": TinyQwen3(fused_qkv=True, head_dim=16, n_head_kv=4),
    "qwen3, biases, factors": TinyQwen3(qkv_bias=True, scales=ATTENTION_TARGETS),
    "gemma": TinyGemma(),
    "gemma, one head of k": TinyGemma(n_head_kv=1, head_dim=48),
    "gemma, biases, factors": TinyGemma(qkv_bias=True, scales=ATTENTION_TARGETS),
    "gemma2": TinyGemma2(),
    "gemma2, pattern": TinyGemma2(n_layer=3, pattern=(False, True, True), rope_base_swa=500.0),
    "gemma2, all local": TinyGemma2(pattern=0, n_swa=1),
    "gemma2, default caps": TinyGemma2(attention_softcap=0.0, logit_softcap=0.0, n_swa=300),
    "gemma2, 27B": TinyGemma2(n_layer=46, n_embd=32, n_ff=32, head_dim=16),
    "gemma2, biases, factors": TinyGemma2(qkv_bias=True, scales=ATTENTION_TARGETS),
    "gemma3": TinyGemma3(),
    "gemma3, own pattern": TinyGemma3(n_layer=7, pattern=None, logit_softcap=3.0),
    "gemma3, no window": TinyGemma3(n_swa=0, pattern=None, n_layer=2),
    "gemma3, stretched, untied": TinyGemma3(
        tied=False, rope_scaling="linear", rope_factor=8.0, rope_base_swa=300.0, n_swa=33
    ),
    "gemma3, pattern": TinyGemma3(pattern=(True, False, True), n_head_kv=4),
    "gemma3, 27B": TinyGemma3(n_layer=62, pattern=None, n_embd=32, n_ff=32, head_dim=16),
    "gemma3, biases, factors": TinyGemma3(qkv_bias=True, scales=ATTENTION_TARGETS),
    "phi3": TinyPhi3(),
    "phi3, long": TinyPhi3(long_factors=True, rope_orig_ctx=128),  # tests have room for 256
    "phi3, short": TinyPhi3(long_factors=True, rope_orig_ctx=256),
    "phi3, apart, in part": TinyPhi3(fused_qkv=False, rope_dim=12, tied=True),
    "phi3, long, in part": TinyPhi3(
        long_factors=True, rope_orig_ctx=128, rope_dim=8, attn_bias=True, window=17
    ),
    "phi3, longrope": TinyPhi3(**LONGROPE),
    "phi3, longrope, short": TinyPhi3(**LONGROPE | {"rope_orig_ctx": 256, "rope_factor": 4.0}),
    "phi3, biases, factors": TinyPhi3(
        attn_bias=True, biases_apart=True, scales=("attn_qkv", "attn_output")
    ),
    "granite": TinyGranite(),
    "granite, biases": TinyGranite(ffn_bias=True, attn_bias=True, tied=True),
    "granite, no scales": TinyGranite(embedding_scale=0, residual_scale=0, attention_scale=0),
    "granite, no positions": TinyGranite(finetuned=False, fused_qkv=True),
    "granite, rope factors": TinyGranite(finetuned=True, rope_freqs=True),
    "granite, longrope": TinyGranite(**LONGROPE, tied=True),
    "granite, biases, factors": TinyGranite(scales=ATTENTION_TARGETS, qkv_bias=True),
    "smollm3": TinySmolLM3(),
    "smollm3, tied, yarn": TinySmolLM3(tied=True, rope_scaling="yarn"),
    "smollm3, biases, factors": TinySmolLM3(qkv_bias=True, scales=ATTENTION_TARGETS),
}
"""Every family with its optional parts on and off, all with windows and scaling that 140 tokens
cross."""
