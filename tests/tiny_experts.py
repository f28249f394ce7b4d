"""Tiny random models of the families with experts, with their optional parts on and off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gguf import GGMLQuantizationType

from tests.gguf_bytes import Array, Value
from tests.tiny import ATTENTION_TARGETS, TinyModel, random_normal, random_uniform
from tests.tiny_families import LONGROPE, TINY_FAMILIES, TinyGranite

STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")

UNSCALED = ("ffn_gate_inp", "ffn_gate_inp_shexp")
"""Whose factors libllama knows none of."""


@dataclass(frozen=True)
class TinyExperts(TinyModel):
    """What they share: a router and stacks of experts in place of the dense feed-forward."""

    n_expert: int = 6
    n_used: int = 2
    n_ff_exp: int = 32
    n_ff_shared: int = 0
    n_group: int = 0  # groups of experts, the best of which are searched; 0: no key
    n_group_used: int = 0
    fused_experts: bool = False  # gate and up in one stack
    router_bias: bool = False
    expert_bias: bool = False

    def expert_matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of router, experts and shared expert."""
        n_embd, n_ff, n_expert = self.n_embd, self.n_ff_exp, self.n_expert
        out: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (n_expert, n_embd)}
        if self.fused_experts:
            out["ffn_gate_up_exps"] = (n_expert, 2 * n_ff, n_embd)
        else:
            out["ffn_gate_exps"] = out["ffn_up_exps"] = (n_expert, n_ff, n_embd)
        out["ffn_down_exps"] = (n_expert, n_embd, n_ff)
        if self.n_ff_shared:
            out["ffn_gate_shexp"] = out["ffn_up_shexp"] = (self.n_ff_shared, n_embd)
            out["ffn_down_shexp"] = (n_embd, self.n_ff_shared)
        return out

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        dense = super().block_matrices()
        return {n: s for n, s in dense.items() if not n.startswith("ffn_")} | self.expert_matrices()

    def own_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {
            "expert_count": self.n_expert,
            "expert_used_count": self.n_used,
            "expert_feed_forward_length": self.n_ff_exp,
        }
        if self.n_group:
            keys["expert_group_count"] = self.n_group
            keys["expert_group_used_count"] = self.n_group_used
        return keys

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """Also biases of router and experts; a stack's scale has a value an expert."""
        out = dict(super().arrays)
        for il in range(self.n_layer):
            for name in UNSCALED:
                out.pop(f"blk.{il}.{name}.scale", None)
            for name in (*STACKS, "attn_k_b", "attn_v_b"):
                if f"blk.{il}.{name}.scale" in out:
                    scale = f"blk.{il}.{name}.scale"
                    n = len(out[f"blk.{il}.{name}.weight"])
                    out[scale] = random_uniform(self.seed, scale, 0.5, 1.5, n)
            if self.router_bias:
                name = f"blk.{il}.ffn_gate_inp.bias"
                out[name] = self.bias(name, self.n_expert)
            for stack in STACKS if self.expert_bias else ():
                weight = out.get(f"blk.{il}.{stack}.weight")
                if weight is not None:
                    name = f"blk.{il}.{stack}.bias"
                    out[name] = np.float32(0.3) * random_normal(self.seed, name, weight.shape[:2])
        return out


@dataclass(frozen=True)
class TinyMixtral(TinyExperts):
    """Llama with experts, as wide as the dense feed-forward."""

    n_ff: int = 32

    arch = "llama"


@dataclass(frozen=True)
class TinyQwen3MoE(TinyExperts):
    """Norms of q and k over each head."""

    head_dim: int = 32

    arch = "qwen3moe"

    def block_norms(self) -> dict[str, int]:
        heads = {"attn_q_norm": self.n_rot, "attn_k_norm": self.n_rot}
        return super().block_norms() | heads


@dataclass(frozen=True)
class TinyQwen2MoE(TinyExperts):
    """Biases of q, k and v; a shared expert behind a gate of one row."""

    n_ff_shared: int = 64

    arch = "qwen2moe"

    def block_biases(self) -> tuple[str, ...]:
        return ("attn_q", "attn_k", "attn_v")

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        return super().block_matrices() | {"ffn_gate_inp_shexp": (1, self.n_embd)}

    def own_keys(self) -> dict[str, Value]:
        return super().own_keys() | {"expert_shared_feed_forward_length": self.n_ff_shared}

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The gate is a vector in the files."""
        gates = {
            name: values.reshape(-1)
            for name, values in super().arrays.items()
            if "ffn_gate_inp_shexp" in name
        }
        return super().arrays | gates


@dataclass(frozen=True)
class TinyGraniteMoE(TinyExperts, TinyGranite):
    """Granite's four constants; experts as wide as the dense feed-forward."""

    n_ff: int = 32

    arch = "granitemoe"

    def own_keys(self) -> dict[str, Value]:
        keys = TinyGranite.own_keys(self) | TinyExperts.own_keys(self)
        if self.n_ff_shared:
            keys["expert_shared_feed_forward_length"] = self.n_ff_shared
        return keys


@dataclass(frozen=True)
class TinyGraniteWithExperts(TinyGraniteMoE):
    """The same under the name of the dense family, without positions."""

    finetuned: bool | None = False

    arch = "granite"


@dataclass(frozen=True)
class TinyDeepSeek2(TinyExperts):
    """Latent attention, absorbed or not, q through a latent vector or not; a dense first layer."""

    n_layer: int = 3
    n_lora_q: int = 24  # 0: libllama takes that of models of 26 or 27 layers alone
    n_lora_kv: int = 32
    n_nope: int = 16
    n_value: int = 24
    rope_dim: int = 8
    absorbed: bool = True
    n_dense_lead: int = 1
    n_shared: int = 2
    gating: int = 0  # 1 softmax, 2 sigmoid; 0: no key
    norm_weights: bool | None = None
    weights_scale: float = 0.0
    selection_bias: bool = False
    yarn_log_multiplier: float = 0.0

    arch = "deepseek2"

    def expert_matrices(self) -> dict[str, tuple[int, ...]]:
        n_ff, n_embd = self.n_shared * self.n_ff_exp, self.n_embd
        out = super().expert_matrices()
        out["ffn_gate_shexp"] = out["ffn_up_shexp"] = (n_ff, n_embd)
        return out | {"ffn_down_shexp": (n_embd, n_ff)}

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        n_q = self.n_head * (self.n_nope + self.rope_dim)
        out: dict[str, tuple[int, ...]] = {}
        if self.n_lora_q:
            out = {"attn_q_a": (self.n_lora_q, self.n_embd), "attn_q_b": (n_q, self.n_lora_q)}
        else:
            out = {"attn_q": (n_q, self.n_embd)}
        out["attn_kv_a_mqa"] = (self.n_lora_kv + self.rope_dim, self.n_embd)
        if self.absorbed:
            out["attn_k_b"] = (self.n_head, self.n_lora_kv, self.n_nope)
            out["attn_v_b"] = (self.n_head, self.n_value, self.n_lora_kv)
        else:
            out["attn_kv_b"] = (self.n_head * (self.n_nope + self.n_value), self.n_lora_kv)
        out["attn_output"] = (self.n_embd, self.n_head * self.n_value)
        return out | self.expert_matrices()

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The first layers have a dense feed-forward."""
        out = super().matrices()
        for il in range(self.n_dense_lead):
            for name in self.expert_matrices():
                del out[f"blk.{il}.{name}.weight"]
            for name in ("ffn_gate", "ffn_up"):
                out[f"blk.{il}.{name}.weight"] = (self.n_ff, self.n_embd)
            out[f"blk.{il}.ffn_down.weight"] = (self.n_embd, self.n_ff)
        return out

    def block_norms(self) -> dict[str, int]:
        q_norm = {"attn_q_a_norm": self.n_lora_q} if self.n_lora_q else {}
        return super().block_norms() | q_norm | {"attn_kv_a_norm": self.n_lora_kv}

    def own_vectors(self) -> dict[str, Array]:
        if not self.selection_bias:
            return {}
        names = [f"blk.{il}.exp_probs_b.bias" for il in range(self.n_dense_lead, self.n_layer)]
        return {name: self.bias(name, self.n_expert) for name in names}

    def own_keys(self) -> dict[str, Value]:
        n_key = self.n_nope + self.rope_dim
        keys: dict[str, Value] = super().own_keys() | {
            "attention.kv_lora_rank": self.n_lora_kv,
            "attention.head_count_kv": 1 if self.absorbed else self.n_head,
            "attention.key_length": self.n_lora_kv + self.rope_dim if self.absorbed else n_key,
            "attention.value_length": self.n_lora_kv if self.absorbed else self.n_value,
            "leading_dense_block_count": self.n_dense_lead,
            "expert_shared_count": self.n_shared,
        }
        if self.absorbed:
            keys["attention.key_length_mla"] = n_key
            keys["attention.value_length_mla"] = self.n_value
        optional: dict[str, Value] = {
            "attention.q_lora_rank": self.n_lora_q,
            "expert_gating_func": self.gating,
            "expert_weights_scale": self.weights_scale,
            "rope.scaling.yarn_log_multiplier": self.yarn_log_multiplier,
        }
        keys |= {name: value for name, value in optional.items() if value}
        if self.norm_weights is not None:
            keys["expert_weights_norm"] = self.norm_weights
        return keys


@dataclass(frozen=True)
class TinyGptOss(TinyExperts):
    """Biases everywhere, sinks, a window in every other layer."""

    attn_bias: bool = True
    router_bias: bool = True
    expert_bias: bool = True
    n_swa: int = 16
    sink: float = 1.0  # their standard deviation

    arch = "gpt-oss"

    def block_norms(self) -> dict[str, int]:
        return {"attn_norm": self.n_embd, "post_attention_norm": self.n_embd}

    def own_keys(self) -> dict[str, Value]:
        return super().own_keys() | {"attention.sliding_window": self.n_swa}

    def own_vectors(self) -> dict[str, Array]:
        names = [f"blk.{il}.attn_sinks.weight" for il in range(self.n_layer)]
        scale = np.float32(self.sink)
        return {name: scale * random_normal(self.seed, name, (self.n_head,)) for name in names}


MXFP4 = GGMLQuantizationType.MXFP4

TINY_EXPERTS: Mapping[str, type[TinyModel]] = {
    family.arch: family
    for family in (
        TinyMixtral,
        TinyQwen2MoE,
        TinyQwen3MoE,
        TinyGraniteMoE,
        TinyDeepSeek2,
        TinyGptOss,
    )
}
"""Each family's tiny model with experts."""

TINY_MODELS: Mapping[str, type[TinyModel]] = {
    **TINY_FAMILIES,
    **{"mixtral" if arch == "llama" else arch: one for arch, one in TINY_EXPERTS.items()},
}
"""Each family's tiny model, dense and with experts, by a name of its own."""

EXPERT_VARIANTS: Mapping[str, TinyModel] = {
    "mixtral": TinyMixtral(),
    "mixtral tied, scales": TinyMixtral(tied=True, scales=True, attn_bias=True),
    "mixtral rope_freqs, biases": TinyMixtral(rope_freqs=True, qkv_bias=True, fused_qkv=True),
    "mixtral one expert a token": TinyMixtral(n_used=1, n_expert=3),
    "qwen2moe": TinyQwen2MoE(),
    "qwen2moe factors": TinyQwen2MoE(scales=ATTENTION_TARGETS),
    "qwen3moe": TinyQwen3MoE(),
    "qwen3moe biases, factors": TinyQwen3MoE(scales=True, qkv_bias=True),
    "qwen3moe all experts": TinyQwen3MoE(n_used=6, tied=True),
    "qwen3moe groups": TinyQwen3MoE(n_expert=9, n_group=3, n_group_used=2),
    "granitemoe": TinyGraniteMoE(),
    "granitemoe shared": TinyGraniteMoE(n_ff_shared=48, tied=True, attn_bias=True),
    "granitemoe rope_freqs, factors": TinyGraniteMoE(
        rope_freqs=True, qkv_bias=True, scales=ATTENTION_TARGETS
    ),
    "granitemoe longrope": TinyGraniteMoE(**LONGROPE),
    "granite with experts": TinyGraniteWithExperts(),
    "deepseek2": TinyDeepSeek2(),
    "deepseek2 factors, selection": TinyDeepSeek2(scales=("attn_output",), selection_bias=True),
    "deepseek2 sigmoid": TinyDeepSeek2(
        gating=2, norm_weights=True, weights_scale=2.5, selection_bias=True
    ),
    "deepseek2 groups": TinyDeepSeek2(
        gating=2, selection_bias=True, n_expert=8, n_group=4, n_group_used=2, norm_weights=True
    ),
    "deepseek2 yarn": TinyDeepSeek2(
        rope_scaling="yarn", rope_factor=8.0, rope_orig_ctx=64, yarn_log_multiplier=0.0707
    ),
    "deepseek2 linear": TinyDeepSeek2(rope_scaling="linear"),
    "deepseek2 kv_b": TinyDeepSeek2(absorbed=False),
    "deepseek2 lite": TinyDeepSeek2(n_layer=26, n_lora_q=0, gating=1, absorbed=False),
    "deepseek2 lite absorbed": TinyDeepSeek2(n_layer=27, n_lora_q=0, n_dense_lead=2, tied=True),
    "deepseek2 fused experts": TinyDeepSeek2(fused_experts=True),
    "gpt-oss": TinyGptOss(),
    "gpt-oss factors": TinyGptOss(scales=ATTENTION_TARGETS),
    "gpt-oss yarn": TinyGptOss(rope_scaling="yarn", rope_factor=32.0, rope_orig_ctx=64, sink=4.0),
    "gpt-oss mxfp4": TinyGptOss(types=dict.fromkeys(STACKS, MXFP4), n_layer=3),
}
"""Optional parts on and off."""
