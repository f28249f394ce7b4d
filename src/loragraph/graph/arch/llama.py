"""general.architecture = llama: Llama 1 to 3, Mistral, SmolLM2 and their like.

x = embed(tokens); per layer x += wo(attend(rope(wq n), rope(wk n), wv n)) with n = norm(x), then
x += down(silu(gate m) * up m) with m = norm(x); logits = output(norm(x)).
Mixtral: that feed-forward is a mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends, GatedFFN, RopeFactors
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.experts import read_experts
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NORM
from loragraph.model.weights import Weights


class Llama:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(
        models="Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama",
        real=("SmolLM2-135M-Instruct Q4_1",),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys; experts are as wide as the dense feed-forward."""
        hparams = read_hparams(keys, NORM)
        if hparams.n_expert:
            if len(set(hparams.n_ff)) > 1:
                raise keys.unsupported(
                    "experts of unlike widths in its layers", what="experts of unlike widths"
                )
            hparams = replace(hparams, experts=read_experts(keys, hparams.n_ff[0], own_width=False))
        return hparams

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.rope_factors = RopeFactors.of(hparams, weights)
        self.layers = [
            _Layer(Block(hparams, weights, il), hparams) for il in range(hparams.n_layer)
        ]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        x = b.embed(self.ends.token_embd)
        for il, layer in enumerate(self.layers):
            attended = self._attention(b, il, layer.attn_norm(b, x))
            if il == self.hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(attended, x)
            x = b.ops.add(layer.ffn(b, layer.ffn_norm(b, x)), x)
        return self.ends.output(b, self.ends.output_norm(b, x))

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q, k, v = layer.qkv(b, x)
        factors = self.rope_factors.of_context(b.n_ctx)
        q = b.rope(q, hparams.rope, factors)
        k = b.rope(k, hparams.rope, factors)
        return layer.wo(b, b.attention(il, q, k, v, hparams.attention_scale))


class _Layer:
    def __init__(self, block: Block, hparams: HParams) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn: GatedFFN | MoE
        if hparams.experts is None:
            self.ffn = block.gated_ffn()
        else:
            self.ffn = MoE(block, hparams.n_embd, hparams.experts)
