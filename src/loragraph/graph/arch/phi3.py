"""general.architecture = phi3: Phi 3, 3.5 and 4, dense.

Llama with one matrix for q, k and v and one for gate and up, q scaled before it meets k, and
longrope: angles divided by one set of factors up to the trained context, by another beyond.
"""

from __future__ import annotations

import logging

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends, RopeFactors
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights

_log = logging.getLogger(__name__)


class Phi3:
    """The family's tensors and its graph."""

    about = About(
        models="Phi 3, 3.5 and 4, mini to medium",
        unsupported=("sliding windows: read and laid aside, as in llama.cpp, with a warning",),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys; some models rotate a part of each head."""
        n_swa = keys.integer("attention.sliding_window", default=0)
        if n_swa:
            # As llama.cpp does, since its converters do not write the key rightly (its PR 13676).
            _log.warning("phi3: the sliding window of %d positions is laid aside", n_swa)
        return read_hparams(keys, NEOX, rotates_part=True)

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.rope_factors = RopeFactors.of(hparams, weights)
        self.layers = [_Layer(Block(hparams, weights, il)) for il in range(hparams.n_layer)]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        x = b.embed(self.ends.token_embd)
        for il, layer in enumerate(self.layers):
            attended = self._attention(b, il, layer.attn_norm(b, x))
            if il == self.hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(attended, x)
            x = b.ops.add(x, layer.ffn(b, layer.ffn_norm(b, x)))
        return self.ends.output(b, self.ends.output_norm(b, x))

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q, k, v = layer.qkv(b, x)
        factors = self.rope_factors.of_context(b.n_ctx)
        q, k = b.rope(q, hparams.rope, factors), b.rope(k, hparams.rope, factors)
        q = b.ops.scale(q, hparams.attention_scale)
        return layer.wo(b, b.attention(il, q, k, v, 1.0))


class _Layer:
    def __init__(self, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.fused_ffn()
