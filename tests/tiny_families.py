"""Tiny random models of the families beside llama, with their optional parts on and off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.gguf_bytes import Array, Value
from tests.tiny import TinyLlama, TinyModel

QKV = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True)
class TinyQwen2(TinyModel):
    """Biases of q, k and v; the head may have one."""

    output_bias: bool = False

    arch = "qwen2"

    def block_biases(self) -> tuple[str, ...]:
        return QKV

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
    """q, k and v in one matrix, gate and up in another; longrope's factors under either type."""

    fused: bool = True  # else attn_q, attn_k, attn_v
    long_factors: bool = False
    window: int = 0  # a key that llama.cpp reads and lays aside

    arch = "phi3"

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        n_q, n_kv = self.n_head * self.n_rot, self.n_head_kv * self.n_rot
        apart = super().block_matrices()
        qkv = {"attn_qkv": (n_q + 2 * n_kv, self.n_embd)}
        return (qkv if self.fused else {name: apart[name] for name in QKV}) | {
            "attn_output": apart["attn_output"],
            "ffn_up": (2 * self.n_ff, self.n_embd),
            "ffn_down": apart["ffn_down"],
        }

    def block_biases(self) -> tuple[str, ...]:
        return (("attn_qkv",) if self.fused else QKV) if self.attn_bias else ()

    def own_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {}
        if self.window:
            keys["attention.sliding_window"] = self.window
        if self.long_factors:
            keys |= {
                "rope.scaling.attn_factor": 1.19,
                "rope.scaling.original_context_length": self.rope_orig_ctx,
            }
        return keys

    def own_vectors(self) -> dict[str, Array]:
        if not self.long_factors:
            return {}
        return {
            "rope_factors_long.weight": self.divisors("rope_factors_long", 30.0),
            "rope_factors_short.weight": self.divisors("rope_factors_short", 1.5),
        }


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
    )
}
"""Each family's tiny model; a test compares the names with the registry's."""
