"""general.architecture = gemma: Gemma 1 and CodeGemma.

Llama with embeddings times sqrt(n_embd), gelu in the feed-forward, a head tied to the table, and
q scaled before it meets k. The norms' weights hold the 1 that the paper adds to them.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams, read_hparams, square_root
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights


class Gemma:
    """The family's tensors and its graph."""

    about = About(models="Gemma 1, CodeGemma")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys; heads are wider than n_embd / n_head, so key_length counts."""
        hparams = read_hparams(keys, NEOX, rotates_part=True)
        return replace(hparams, embedding_scale=square_root(hparams.n_embd))

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [_Layer(Block(hparams, weights, il)) for il in range(hparams.n_layer)]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        x = b.ops.scale(b.embed(self.ends.token_embd), self.hparams.embedding_scale)
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
        q, k = b.rope(q, hparams.rope), b.rope(k, hparams.rope)
        q = b.ops.scale(q, hparams.attention_scale)
        return layer.wo(b, b.attention(il, q, k, v, 1.0))


class _Layer:
    def __init__(self, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.gated_ffn(gelu=True)
