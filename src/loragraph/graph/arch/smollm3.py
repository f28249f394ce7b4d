"""general.architecture = smollm3: SmolLM3.

Llama in which every fourth layer has no positions.
"""

from __future__ import annotations

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NORM
from loragraph.model.weights import Weights

_PERIOD = 4


class SmolLM3:
    """The family's tensors and its graph."""

    about = About(models="SmolLM3")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys."""
        return read_hparams(keys, NORM)

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [_Layer(Block(hparams, weights, il)) for il in range(hparams.n_layer)]

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
        if (il + 1) % _PERIOD:
            q, k = b.rope(q, hparams.rope), b.rope(k, hparams.rope)
        return layer.wo(b, b.attention(il, q, k, v, hparams.attention_scale))


class _Layer:
    def __init__(self, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.gated_ffn()
