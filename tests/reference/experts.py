"""The families with experts in float64 numpy: a second reading of the papers, like family.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.reference.adapter import read_metadata
from tests.reference.family import ReferenceFamily
from tests.reference.llama import Active, Float, softmax

_NEOX = ("qwen2moe", "qwen3moe", "gpt-oss")


@dataclass(frozen=True)
class ReferenceExperts(ReferenceFamily):
    """What routers, gpt-oss and latent attention need beside the numbers of the dense families."""

    arch: str = ""
    n_used: int = 0
    sigmoid: bool = False  # of the router's logits; else softmax
    norm_weights: bool = True
    weights_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    n_lora_kv: int = 0  # 0: no latent attention

    @classmethod
    def read(cls, path: str | Path, n_ctx: int) -> ReferenceExperts:
        """A GGUF model."""
        keys = read_metadata(path)
        arch = str(keys["general.architecture"])
        number = _numbers(keys, arch)
        base = super().read(path, n_ctx)
        assert isinstance(base, ReferenceExperts)
        rope = replace(base.rope, pairs="neox" if arch in _NEOX else "norm")
        n_swa = int(number("attention.sliding_window", 0))
        windows = tuple(n_swa * (il % 2 == 0) for il in range(base.n_layer))
        out = replace(
            base,
            weights={_renamed(name, arch): _as_matrix(name, w) for name, w in base.weights.items()},
            arch=arch,
            rope=rope,
            ropes=tuple(None if one is None else rope for one in base.ropes),
            windows=windows,
            n_used=int(number("expert_used_count")),
            sigmoid=number("expert_gating_func", 1) == 2,
            norm_weights=bool(keys.get(f"{arch}.expert_weights_norm", _normalises(arch))),
            weights_scale=number("expert_weights_scale", 0) or 1.0,
            n_group=int(number("expert_group_count", 0)) or 1,
            n_group_used=int(number("expert_group_used_count", 0)) or 1,
            n_lora_kv=int(number("attention.kv_lora_rank", 0)),
        )
        return out._stretched(keys) if out.n_lora_kv else out

    def _stretched(self, keys: Mapping[str, object]) -> ReferenceExperts:
        """DeepSeek's scale of the scores where positions are stretched (YaRN's mscale)."""
        number = _numbers(keys, self.arch)
        n_key = number("attention.key_length_mla", number("attention.key_length"))
        log_factor = math.log(self.rope.factor)
        log_multiplier = number("rope.scaling.yarn_log_multiplier", 0) * 10
        rope, mscale = self.rope, 1 + 0.1 * log_factor
        if log_multiplier:
            rope = replace(rope, attn_factor=1 / mscale)
            mscale = 1 + 0.1 * log_multiplier * log_factor
        ropes = (rope,) * self.n_layer
        return replace(self, rope=rope, ropes=ropes, attention_scale=mscale**2 / math.sqrt(n_key))

    def _attention(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        q, k, v = self._latent(il, x, adapters) if self.n_lora_kv else self._turned(il, x, adapters)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) * self.attention_scale
        age = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (age >= 0) & (age < (self.windows[il] or len(x)))
        scores = np.where(seen, scores, -np.inf)
        sinks = self.weights.get(f"blk.{il}.attn_sinks.weight")
        if sinks is not None:
            column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = softmax(scores)[..., : len(x)]
        mixed = np.einsum("hts,shd->thd", weights, v)
        if f"blk.{il}.attn_v_b.weight" in self.weights:
            mixed = self._heads(f"blk.{il}.attn_v_b", mixed, adapters)
        return self._linear(f"blk.{il}.attn_output", mixed.reshape(len(x), -1), adapters)

    def _turned(self, il: int, x: Float, adapters: Sequence[Active]) -> tuple[Float, Float, Float]:
        q, k, v = self._qkv(il, x, adapters)
        q = self._maybe_norm(f"blk.{il}.attn_q_norm", q)
        k = self._maybe_norm(f"blk.{il}.attn_k_norm", k)
        rope = self.ropes[il]
        return (q, k, v) if rope is None else (rope.rotate(q), rope.rotate(k), v)

    def _latent(self, il: int, x: Float, adapters: Sequence[Active]) -> tuple[Float, Float, Float]:
        """q, k, v of every head, or with attn_k_b one k and v that all heads read."""
        n, n_rot, block = len(x), self.rope.n_rot, f"blk.{il}"
        q = x
        if f"{block}.attn_q_a.weight" in self.weights:
            q = self._norm(f"{block}.attn_q_a_norm", self._linear(f"{block}.attn_q_a", x, adapters))
            q = self._linear(f"{block}.attn_q_b", q, adapters)
        else:
            q = self._linear(f"{block}.attn_q", x, adapters)
        q = q.reshape(n, self.n_head, -1)
        both = self._linear(f"{block}.attn_kv_a_mqa", x, adapters)
        latent = self._norm(f"{block}.attn_kv_a_norm", both[:, : self.n_lora_kv])
        k_rot = self.rope.rotate(both[:, None, self.n_lora_kv :])
        q_nope, q_rot = q[..., :-n_rot], self.rope.rotate(q[..., -n_rot:])
        n_nope = q_nope.shape[-1]
        if f"{block}.attn_kv_b.weight" in self.weights:
            kv = self._linear(f"{block}.attn_kv_b", latent, adapters).reshape(n, self.n_head, -1)
            k_nope, v = kv[..., :n_nope], kv[..., n_nope:]
            k_rot = k_rot.repeat(self.n_head, axis=1)
        else:
            # A query meets attn_k_b of its own adapters, whatever made the keys.
            q_nope = self._heads(f"{block}.attn_k_b", q_nope, adapters)
            k_nope = v = latent[:, None]
        q = np.concatenate([q_nope, q_rot], axis=-1)
        return q, np.concatenate([k_nope, k_rot], axis=-1), v

    def _heads(self, name: str, x: Float, adapters: Sequence[Active]) -> Float:
        """A matrix a head: (n_tokens, n_head, n_out) of x (n_tokens, n_head, n_in)."""
        rows = [
            [self._of_expert(name, head, t, vector, adapters) for head, vector in enumerate(heads)]
            for t, heads in enumerate(x)
        ]
        return np.array(rows)

    def _ffn(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        block = f"blk.{il}"
        if f"{block}.ffn_gate_inp.weight" not in self.weights:
            return super()._ffn(il, x, adapters)
        out = np.zeros_like(x)
        for t, (ids, weights) in enumerate(self._routed(block, x, adapters)):
            for expert, weight in zip(ids, weights, strict=True):
                out[t] += weight * self._expert(block, expert, t, x[t], adapters)
        if f"{block}.ffn_up_shexp.weight" in self.weights:
            up = self._linear(f"{block}.ffn_up_shexp", x, adapters)
            gate = self._linear(f"{block}.ffn_gate_shexp", x, adapters)
            shared = self._linear(f"{block}.ffn_down_shexp", _silu(gate) * up, adapters)
            if f"{block}.ffn_gate_inp_shexp.weight" in self.weights:
                gate = self._linear(f"{block}.ffn_gate_inp_shexp", x, adapters)
                shared = shared / (1 + np.exp(-gate))
            out = out + shared
        return out

    def _routed(
        self, block: str, x: Float, adapters: Sequence[Active]
    ) -> list[tuple[list[int], Float]]:
        """Each token's experts and their weights."""
        logits = self._linear(f"{block}.ffn_gate_inp", x, adapters)
        oai = self.arch == "gpt-oss"
        probs = logits if oai else 1 / (1 + np.exp(-logits)) if self.sigmoid else softmax(logits)
        choice = probs + self.weights.get(f"{block}.exp_probs_b.bias", np.zeros(1))
        routed = []
        for p, c in zip(probs, choice, strict=True):
            ids = self._best(c)
            weights = softmax(p[ids]) if oai else p[ids]
            if self.norm_weights:
                weights = weights / weights.sum()
            routed.append((ids, weights * self.weights_scale))
        return routed

    def _best(self, scores: Float) -> list[int]:
        groups = scores.reshape(self.n_group, -1)
        if self.n_group > 1:
            best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            kept = np.argsort(-best)[: self.n_group_used]
            mask = np.full_like(groups, -np.inf)
            mask[kept] = groups[kept]
            scores = mask.ravel()
        return [int(i) for i in np.argsort(-scores, kind="stable")[: self.n_used]]

    def _expert(
        self, block: str, expert: int, t: int, x: Float, adapters: Sequence[Active]
    ) -> Float:
        if f"{block}.ffn_gate_up_exps.weight" in self.weights:
            both = self._of_expert(f"{block}.ffn_gate_up_exps", expert, t, x, adapters)
            gate, up = np.split(both, 2)
        else:
            gate = self._of_expert(f"{block}.ffn_gate_exps", expert, t, x, adapters)
            up = self._of_expert(f"{block}.ffn_up_exps", expert, t, x, adapters)
        if self.arch == "gpt-oss":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        else:
            hidden = _silu(gate) * up
        return self._of_expert(f"{block}.ffn_down_exps", expert, t, hidden, adapters)

    def _of_expert(
        self, name: str, expert: int, t: int, x: Float, adapters: Sequence[Active]
    ) -> Float:
        """One expert's product with x (n_in,) of token `t`, whose scales apply."""
        y: Float = self.weights[f"{name}.weight"][expert] @ x
        if f"{name}.scale" in self.weights:
            y = y * self.weights[f"{name}.scale"][expert]
        for adapter, scale in adapters:
            if f"{name}.weight" in adapter.pairs:
                a, b = (half[expert].astype(np.float64) for half in adapter.pairs[f"{name}.weight"])
                own = scale if isinstance(scale, int | float) else scale[t]
                y = y + adapter.scale(f"{name}.weight", own) * (b @ (a @ x))
        if f"{name}.bias" in self.weights:
            y = y + self.weights[f"{name}.bias"][expert]
        return y


def _normalises(arch: str) -> bool:
    return arch in ("llama", "qwen3moe", "granite", "granitemoe")


def _renamed(name: str, arch: str) -> str:
    """gpt-oss calls the norm before its experts by where it stands."""
    return name.replace("post_attention_norm", "ffn_norm") if arch == "gpt-oss" else name


def _as_matrix(name: str, values: Float) -> Float:
    """qwen2moe's gate of the shared expert is written as a vector: a matrix of one row."""
    return values.reshape(1, -1) if name.endswith("ffn_gate_inp_shexp.weight") else values


def _silu(x: Float) -> Float:
    out: Float = x / (1 + np.exp(-x))
    return out


def _numbers(keys: Mapping[str, object], arch: str) -> Callable[..., float]:
    def number(name: str, default: float | None = None) -> float:
        return float(str(keys.get(f"{arch}.{name}", default)))

    return number
