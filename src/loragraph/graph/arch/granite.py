"""general.architecture = granite: Granite 3 and 4 (those with experts: granitemoe.py).

Llama with four constants: embeddings, both residual branches and scores times one each, logits
divided by the last. A model that was trained without positions has none.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends, GatedFFN, RopeFactors
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.experts import ExpertParams, read_experts
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import MAX_SIZE, Keys
from loragraph.model.rope import NORM
from loragraph.model.weights import Weights


class Granite:
    """The family's tensors and its graph."""

    about = About(
        models="Granite 3 and 4 without experts and state-space layers",
        unsupported=("images (deepstack_mapping)",),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, the four constants, and whether positions count."""
        if "deepstack_mapping" in keys:
            raise keys.unsupported(
                "deepstack_mapping: layers that read images", what="granite with images"
            )
        hparams = read_hparams(keys, NORM)
        return replace(
            hparams,
            experts=_read_experts(keys, hparams) if hparams.n_expert else None,
            embedding_scale=keys.factor("embedding_scale"),
            residual_scale=keys.factor("residual_scale"),
            attention_scale=keys.real("attention.scale", default=0.0) or hparams.attention_scale,
            logit_scale=keys.real("logit_scale", low=1e-6),
            has_positions=keys.boolean("rope.scaling.finetuned", default=True),
        )

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.rope_factors = RopeFactors.of(hparams, weights)
        self.layers = [
            _Layer(Block(hparams, weights, il), hparams) for il in range(hparams.n_layer)
        ]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        hparams = self.hparams
        x = b.scaled(b.embed(self.ends.token_embd), hparams.embedding_scale)
        for il, layer in enumerate(self.layers):
            attended = self._attention(b, il, layer.attn_norm(b, x))
            if il == hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(b.scaled(attended, hparams.residual_scale), x)
            fed = layer.ffn(b, layer.ffn_norm(b, x))
            x = b.ops.add(b.scaled(fed, hparams.residual_scale), x)
        logits = self.ends.output(b, self.ends.output_norm(b, x))
        return b.ops.scale(logits, 1.0 / hparams.logit_scale)

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q, k, v = layer.qkv(b, x)
        if hparams.has_positions:
            factors = self.rope_factors.of_context(b.n_ctx)
            q, k = b.rope(q, hparams.rope, factors), b.rope(k, hparams.rope, factors)
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


def _read_experts(keys: Keys, hparams: HParams) -> ExpertParams:
    """Experts are as wide as the dense feed-forward would be; a shared one has a key."""
    n_shared = keys.integer("expert_shared_feed_forward_length", default=0, high=MAX_SIZE)
    experts = read_experts(keys, hparams.n_ff[0], own_width=False)
    return replace(experts, n_ff_shared=n_shared)
