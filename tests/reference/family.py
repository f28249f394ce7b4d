"""Every dense family in float64 numpy: what stands in the file decides what is computed.

A second reading of the papers, not of loragraph's code: like `ReferenceLlama`, which it extends,
it knows no cache, no batch and no ggml. Constants that a family has and no key states are below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.reference.adapter import read_metadata, read_tensors
from tests.reference.llama import Active, Float, ReferenceLlama, softmax
from tests.reference.rope import Rope

_NEOX = ("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # scores divided by sqrt(n_embd / n_head)
_PERIOD = {"gemma2": 2, "gemma3": 6}
_DEFAULTS = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"rope.freq_base_swa": 10000.0},
}


@dataclass(frozen=True)
class ReferenceFamily(ReferenceLlama):
    """The numbers of a family beside those that llama has; windows and ropes are by layer."""

    gelu: bool = False
    windows: tuple[int, ...] = ()
    ropes: tuple[Rope | None, ...] = ()
    attention_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @classmethod
    def read(cls, path: str | Path, n_ctx: int) -> ReferenceFamily:
        """A GGUF model for sequences of up to `n_ctx` tokens, which decides longrope's factors."""
        keys = read_metadata(path)
        arch = str(keys["general.architecture"])
        weights = {name: values.astype(np.float64) for name, values in read_tensors(path).items()}
        number = _numbers(keys, arch)
        n_layer, n_head = int(number("block_count")), int(number("attention.head_count"))
        n_embd = int(number("embedding_length"))
        head_dim = int(number("attention.key_length", n_embd // n_head))
        scaled_by = n_embd // n_head if n_layer == _LAYERS_27B.get(arch) else head_dim
        windows = _windows(keys, arch, n_layer)
        gemma = arch.startswith("gemma")
        return cls(
            weights=weights,
            n_layer=n_layer,
            n_head=n_head,
            n_head_kv=int(number("attention.head_count_kv")),
            rms_eps=number("attention.layer_norm_rms_epsilon"),
            rope=_rope(keys, arch, head_dim, weights, n_ctx),
            gelu=gemma,
            windows=windows,
            ropes=_ropes(keys, arch, _rope(keys, arch, head_dim, weights, n_ctx), windows),
            attention_scale=number("attention.scale", 0.0) or scaled_by**-0.5,
            attention_softcap=number("attn_logit_softcapping", 0.0),
            logit_softcap=number("final_logit_softcapping", 0.0),
            embedding_scale=n_embd**0.5 if gemma else number("embedding_scale", 1.0),
            residual_scale=number("residual_scale", 1.0),
            logit_scale=number("logit_scale", 1.0),
        )

    def logits(
        self, tokens: Sequence[int], adapters: Sequence[Active] = (), *, tied_output: bool = True
    ) -> Float:
        """Logits (n_tokens, n_vocab) of a whole sequence at positions 0, 1, ..."""
        x = self._embed(tokens, adapters) * self.embedding_scale
        for il in range(self.n_layer):
            h = self._attention(il, self._norm(f"blk.{il}.attn_norm", x), adapters)
            x = x + self._maybe_norm(f"blk.{il}.post_attention_norm", h) * self.residual_scale
            h = self._ffn(il, self._norm(f"blk.{il}.ffn_norm", x), adapters)
            x = x + self._maybe_norm(f"blk.{il}.post_ffw_norm", h) * self.residual_scale
        logits = self._head(self._norm("output_norm", x), adapters, tied_output)
        logits = logits + self.weights.get("output.bias", np.zeros(1))
        return _softcap(logits, self.logit_softcap) / self.logit_scale

    def _attention(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        n_tokens, group = len(x), self.n_head // self.n_head_kv
        q, k, v = self._qkv(il, x, adapters)
        q = self._maybe_norm(f"blk.{il}.attn_q_norm", q)
        k = self._maybe_norm(f"blk.{il}.attn_k_norm", k)
        rope = self.ropes[il]
        if rope is not None:
            q, k = rope.rotate(q), rope.rotate(k)
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) * self.attention_scale
        scores = _softcap(scores, self.attention_softcap)
        age = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        seen = (age >= 0) & (age < (self.windows[il] or n_tokens))
        mixed = np.einsum("hts,shd->thd", softmax(np.where(seen, scores, -np.inf)), v)
        return self._linear(f"blk.{il}.attn_output", mixed.reshape(n_tokens, -1), adapters)

    def _qkv(self, il: int, x: Float, adapters: Sequence[Active]) -> tuple[Float, Float, Float]:
        """q, k, v (n_tokens, heads, head_dim), whether one matrix holds them or three."""
        fused, names = f"blk.{il}.attn_qkv", [f"blk.{il}.attn_{one}" for one in "qkv"]
        if f"{fused}.weight" in self.weights:
            y = self._linear(fused, x, adapters)
            if f"{names[0]}.bias" in self.weights:
                y = y + np.concatenate([self.weights[f"{name}.bias"] for name in names])
        else:
            y = np.concatenate([self._linear(name, x, adapters) for name in names], axis=-1)
        heads = y.reshape(len(x), self.n_head + 2 * self.n_head_kv, -1)
        q, k, v = np.split(heads, [self.n_head, self.n_head + self.n_head_kv], axis=1)
        return q, k, v

    def _ffn(self, il: int, x: Float, adapters: Sequence[Active]) -> Float:
        up = self._linear(f"blk.{il}.ffn_up", x, adapters)
        if f"blk.{il}.ffn_gate.weight" in self.weights:
            gate = self._linear(f"blk.{il}.ffn_gate", x, adapters)
        else:
            gate, up = np.split(up, 2, axis=-1)
        bent = _gelu(gate) if self.gelu else gate / (1 + np.exp(-gate))
        return self._linear(f"blk.{il}.ffn_down", bent * up, adapters)

    def _maybe_norm(self, name: str, x: Float) -> Float:
        return self._norm(name, x) if f"{name}.weight" in self.weights else x


def _numbers(keys: Mapping[str, object], arch: str) -> Callable[..., float]:
    def number(name: str, default: float | None = None) -> float:
        default = _DEFAULTS.get(arch, {}).get(name, default)
        return float(str(keys.get(f"{arch}.{name}", default)))

    return number


def _windows(keys: Mapping[str, object], arch: str, n_layer: int) -> tuple[int, ...]:
    """The newest positions that a layer sees, 0 for all."""
    n_swa = keys.get(f"{arch}.attention.sliding_window", 4096 if arch == "gemma2" else 0)
    if arch not in _PERIOD or not isinstance(n_swa, int):
        return (0,) * n_layer
    pattern = keys.get(f"{arch}.attention.sliding_window_pattern", _PERIOD[arch])
    if isinstance(pattern, list):
        return tuple(n_swa * bool(local) for local in pattern)
    assert isinstance(pattern, int)
    return tuple(n_swa * (not pattern or (il + 1) % pattern != 0) for il in range(n_layer))


def _rope(
    keys: Mapping[str, object], arch: str, head_dim: int, weights: Mapping[str, Float], n_ctx: int
) -> Rope:
    n_orig = keys.get(f"{arch}.rope.scaling.original_context_length", n_ctx)
    assert isinstance(n_orig, int)
    factors = "rope_factors_long" if n_ctx > n_orig else "rope_factors_short"
    freqs = weights.get("rope_freqs.weight", weights.get(f"{factors}.weight"))
    rope = Rope.from_metadata(keys, head_dim, freqs)
    return replace(rope, pairs="neox" if arch in _NEOX else "norm")


def _ropes(
    keys: Mapping[str, object], arch: str, rope: Rope, windows: tuple[int, ...]
) -> tuple[Rope | None, ...]:
    """The rotation of each layer, None where a model has no positions."""
    if keys.get(f"{arch}.rope.scaling.finetuned") is False:
        return (None,) * len(windows)
    base = _numbers(keys, arch)("rope.freq_base_swa", rope.freq_base)
    local = replace(rope, freq_base=base)
    if arch == "gemma3":
        local = replace(local, scaling="none")
    ropes: list[Rope | None] = [local if window else rope for window in windows]
    if arch == "smollm3":
        ropes[3::4] = [None] * len(ropes[3::4])
    return tuple(ropes)


def _softcap(x: Float, most: float) -> Float:
    out: Float = most * np.tanh(x / most) if most else x
    return out


def _gelu(x: Float) -> Float:
    """The tanh form."""
    out: Float = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return out
