"""The llama family in float64 numpy, written to be read: the oracle for every number.

It knows no cache, no batch and no ggml: a whole sequence goes in, logits come out. LoRA is applied
at run time, with one scale per token if wanted, since a token carries its own adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tests.reference.adapter import AdapterArrays, read_metadata, read_tensors
from tests.reference.rope import Rope

Float: TypeAlias = npt.NDArray[np.float64]
# An adapter and its user scale, or one scale per token (n_tokens).
Active: TypeAlias = tuple[AdapterArrays, float | Sequence[float] | Float]


@dataclass(frozen=True)
class ReferenceLlama:
    """Weights of one model in float64, by GGUF name, and the few numbers of its shape.

    `ffn_scale_last` multiplies the scale tensors of the FFN into everything, low-rank part and bias
    included, as libllama does; otherwise they scale the base product alone, as in attention.
    """

    weights: Mapping[str, Float]
    n_layer: int
    n_head: int
    n_head_kv: int
    rms_eps: float
    rope: Rope
    ffn_scale_last: bool = False

    @classmethod
    def load(cls, *paths: str | Path, ffn_scale_last: bool = False) -> ReferenceLlama:
        """Read a GGUF model (all files of a split one, the first first)."""
        keys = read_metadata(paths[0])
        weights = {name: values.astype(np.float64) for name, values in read_tensors(*paths).items()}
        n_head = _integer(keys, "llama.attention.head_count")
        head_dim = weights["blk.0.attn_q.weight"].shape[0] // n_head
        return cls(
            weights=weights,
            n_layer=_integer(keys, "llama.block_count"),
            n_head=n_head,
            n_head_kv=_integer(keys, "llama.attention.head_count_kv", n_head),
            rms_eps=_number(keys, "llama.attention.layer_norm_rms_epsilon"),
            rope=Rope.from_metadata(keys, head_dim, weights.get("rope_freqs.weight")),
            ffn_scale_last=ffn_scale_last,
        )

    @property
    def tied(self) -> bool:
        """Whether the token table is the output head too."""
        return "output.weight" not in self.weights

    def logits(
        self, tokens: Sequence[int], adapters: Sequence[Active] = (), *, tied_output: bool = True
    ) -> Float:
        """Logits (n_tokens, n_vocab) of a whole sequence at positions 0, 1, ...

        `tied_output`: on a tied base, an adapter of the token table changes the head too.
        """
        x = self._embed(tokens, adapters)
        for il in range(self.n_layer):
            h = self._norm(f"blk.{il}.attn_norm", x)
            x = x + self._attention(il, h, adapters)
            h = self._norm(f"blk.{il}.ffn_norm", x)
            x = x + self._ffn(il, h, adapters)
        return self._head(self._norm("output_norm", x), adapters, tied_output)

    def _embed(self, tokens: Sequence[int], adapters: Sequence[Active]) -> Float:
        name = "token_embd.weight"
        ids = np.asarray(tokens)
        x: Float = self.weights[name][ids]
        for adapter, scale in adapters:
            if name in adapter.pairs:
                a, b = adapter.pairs[name]
                delta = a.astype(np.float64)[ids] @ b.astype(np.float64).T
                x = x + _effective(adapter, name, scale) * delta
        return x

    def _attention(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        n_tokens = len(x)
        q = self._linear(f"blk.{il}.attn_q", x, adapters).reshape(n_tokens, self.n_head, -1)
        k = self._linear(f"blk.{il}.attn_k", x, adapters).reshape(n_tokens, self.n_head_kv, -1)
        v = self._linear(f"blk.{il}.attn_v", x, adapters).reshape(n_tokens, self.n_head_kv, -1)
        group = self.n_head // self.n_head_kv
        q, k = self.rope.rotate(q), self.rope.rotate(k).repeat(group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        future = np.triu(np.ones((n_tokens, n_tokens), dtype=bool), 1)
        mixed = np.einsum(
            "hts,shd->thd", softmax(np.where(future, -np.inf, scores)), v.repeat(group, axis=1)
        )
        return self._linear(f"blk.{il}.attn_output", mixed.reshape(n_tokens, -1), adapters)

    def _ffn(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        last = self.ffn_scale_last
        gate = self._linear(f"blk.{il}.ffn_gate", x, adapters, scale_last=last)
        up = self._linear(f"blk.{il}.ffn_up", x, adapters, scale_last=last)
        silu = gate / (1 + np.exp(-gate))
        return self._linear(f"blk.{il}.ffn_down", silu * up, adapters, scale_last=last)

    def _head(self, x: Float, adapters: Sequence[Active], tied_output: bool) -> Float:
        table = "token_embd.weight"
        logits: Float = x @ self.weights[table if self.tied else "output.weight"].T
        logits = logits + _low_rank("output.weight", x, adapters)
        if self.tied and tied_output:
            for adapter, scale in adapters:
                if table in adapter.pairs:
                    a, b = (half.astype(np.float64) for half in adapter.pairs[table])
                    logits = logits + _effective(adapter, table, scale) * (x @ b @ a.T)
        return logits

    def _linear(
        self, name: str, x: Float, adapters: Sequence[Active], *, scale_last: bool = False
    ) -> Float:
        w_s = self.weights.get(f"{name}.scale", np.ones(1))
        bias = self.weights.get(f"{name}.bias", np.zeros(1))
        base = x @ self.weights[f"{name}.weight"].T
        delta = _low_rank(f"{name}.weight", x, adapters)
        return w_s * (base + delta + bias) if scale_last else w_s * base + delta + bias

    def _norm(self, name: str, x: Float) -> Float:
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.rms_eps)
        out: Float = x / rms * self.weights[f"{name}.weight"]
        return out


def _low_rank(name: str, x: Float, adapters: Sequence[Active]) -> Float:
    """Sum of scale_i B_i A_i x over the adapters that have this weight."""
    total: Float = np.zeros(1)
    for adapter, scale in adapters:
        if name in adapter.pairs:
            a, b = (half.astype(np.float64) for half in adapter.pairs[name])
            total = total + _effective(adapter, name, scale) * (x @ a.T @ b.T)
    return total


def _effective(adapter: AdapterArrays, name: str, scale: float | Sequence[float] | Float) -> Float:
    """Scale per token as a column (n_tokens or 1, 1)."""
    return adapter.scale(name, 1.0) * np.asarray(scale, dtype=np.float64).reshape(-1, 1)


def softmax(x: Float) -> Float:
    """Over the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Float = weights / weights.sum(axis=-1, keepdims=True)
    return out


def _integer(keys: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = keys.get(name, default)
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    return value


def _number(keys: Mapping[str, object], name: str) -> float:
    value = keys[name]
    if not isinstance(value, float):
        raise TypeError(f"{name}: expected a float, got {value!r}")
    return value
