"""general.architecture = llama: Llama 1 to 3, Mistral, SmolLM2 and their like.

x = embed(tokens); per layer x += wo(attend(rope(wq n), rope(wk n), wv n)) with n = norm(x), then
x += down(silu(gate m) * up m) with m = norm(x); logits = output(norm(x)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loragraph.errors import UnsupportedError
from loragraph.ggml.handles import Tensor
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams
from loragraph.model.weights import Weight, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: Weight
    wq: Weight
    wk: Weight
    wv: Weight
    wo: Weight
    bq: Weight | None
    bk: Weight | None
    bv: Weight | None
    bo: Weight | None
    ffn_norm: Weight
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight
    ffn_gate_b: Weight | None
    ffn_up_b: Weight | None
    ffn_down_b: Weight | None


class Llama:
    """The family's tensors, asked for by name and shape, and its graph."""

    rope_mode = 0  # pairs (2i, 2i + 1); GGUF's q and k rows are ordered for it

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        if hparams.n_expert:
            raise UnsupportedError(
                f"a llama model with {hparams.n_expert} experts", what="llama with experts"
            )
        n_embd, n_vocab = hparams.n_embd, hparams.n_vocab
        self.hparams = hparams
        self.token_embd = weights.lookup("token_embd.weight", n_embd, n_vocab)
        self.output_norm = weights.vector("output_norm.weight", n_embd)
        self.output = weights.linear_or_tied("output.weight", "token_embd.weight", n_embd, n_vocab)
        self.rope_freqs = weights.optional_vector("rope_freqs.weight", hparams.rope.n_rot // 2)
        self.layers = [_layer(hparams, weights, il) for il in range(hparams.n_layer)]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        eps = self.hparams.norm_rms_eps
        x = b.embed(self.token_embd)
        for il, layer in enumerate(self.layers):
            attended = self._attention(b, il, b.rms_norm(x, layer.attn_norm, eps))
            if il == self.hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(attended, x)
            x = b.ops.add(self._ffn(b, layer, b.rms_norm(x, layer.ffn_norm, eps)), x)
        return b.linear(self.output, b.rms_norm(x, self.output_norm, eps))

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q = b.heads(b.linear(layer.wq, x, layer.bq), hparams.n_head[il])
        k = b.heads(b.linear(layer.wk, x, layer.bk), hparams.n_head_kv[il])
        v = b.heads(b.linear(layer.wv, x, layer.bv), hparams.n_head_kv[il])
        q = b.rope(q, hparams.rope, self.rope_freqs)
        k = b.rope(k, hparams.rope, self.rope_freqs)
        out = b.attention(il, q, k, v, 1.0 / math.sqrt(hparams.n_embd_head))
        return b.linear(layer.wo, out, layer.bo)

    def _ffn(self, b: Builder, layer: _Layer, x: Tensor) -> Tensor:
        up = b.linear(layer.ffn_up, x, layer.ffn_up_b)
        gate = b.linear(layer.ffn_gate, x, layer.ffn_gate_b)
        return b.linear(layer.ffn_down, b.ops.swiglu_split(gate, up), layer.ffn_down_b)


def _layer(hparams: HParams, weights: Weights, il: int) -> _Layer:
    n_embd, n_ff = hparams.n_embd, hparams.n_ff[il]
    n_q, n_kv = hparams.n_head[il] * hparams.n_embd_head, hparams.n_embd_kv(il)

    def linear(name: str, n_in: int, n_out: int) -> Weight:
        return weights.linear(f"blk.{il}.{name}.weight", n_in, n_out)

    def bias(name: str, n: int) -> Weight | None:
        return weights.optional_vector(f"blk.{il}.{name}.bias", n)

    return _Layer(
        attn_norm=weights.vector(f"blk.{il}.attn_norm.weight", n_embd),
        wq=linear("attn_q", n_embd, n_q),
        wk=linear("attn_k", n_embd, n_kv),
        wv=linear("attn_v", n_embd, n_kv),
        wo=linear("attn_output", n_q, n_embd),
        bq=bias("attn_q", n_q),
        bk=bias("attn_k", n_kv),
        bv=bias("attn_v", n_kv),
        bo=bias("attn_output", n_embd),
        ffn_norm=weights.vector(f"blk.{il}.ffn_norm.weight", n_embd),
        ffn_gate=linear("ffn_gate", n_embd, n_ff),
        ffn_up=linear("ffn_up", n_embd, n_ff),
        ffn_down=linear("ffn_down", n_ff, n_embd),
        ffn_gate_b=bias("ffn_gate", n_ff),
        ffn_up_b=bias("ffn_up", n_ff),
        ffn_down_b=bias("ffn_down", n_embd),
    )
