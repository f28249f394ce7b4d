"""general.architecture = qwen2: Qwen 1.5 to 2.5.

Llama with biases of q, k and v, and the other pairing of rotated values.
"""

from __future__ import annotations

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights


class Qwen2:
    """The family's tensors and its graph."""

    about = About(models="Qwen 1.5, 2 and 2.5")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys."""
        return read_hparams(keys, NEOX)

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
        q, k = b.rope(q, hparams.rope), b.rope(k, hparams.rope)
        return layer.wo(b, b.attention(il, q, k, v, hparams.attention_scale))


class _Layer:
    def __init__(self, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.gated_ffn()
