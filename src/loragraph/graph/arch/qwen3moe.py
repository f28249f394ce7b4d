"""general.architecture = qwen3moe: Qwen3 with experts (30B-A3B, 235B-A22B).

Like qwen3, with heads of q and k normed before they turn; every feed-forward is a mixture of
experts, softmax over all of them, the weights of the chosen made to sum to 1.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.experts import read_experts
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights


class Qwen3MoE:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, and the experts'."""
        hparams = read_hparams(keys, NEOX, needs_ffn=False)
        return replace(hparams, experts=read_experts(keys, hparams.n_ff[0], own_width=True))

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
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
            x = b.ops.add(layer.moe(b, layer.ffn_norm(b, x)), x)
        return self.ends.output(b, self.ends.output_norm(b, x))

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q, k, v = layer.qkv(b, x)
        q = b.rope(layer.q_norm(b, q), hparams.rope)
        k = b.rope(layer.k_norm(b, k), hparams.rope)
        return layer.wo(b, b.attention(il, q, k, v, hparams.attention_scale))


class _Layer:
    def __init__(self, block: Block, hparams: HParams) -> None:
        assert hparams.experts is not None  # read_hparams read them
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.q_norm = block.norm("attn_q_norm", hparams.n_embd_head)
        self.k_norm = block.norm("attn_k_norm", hparams.n_embd_head)
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.moe = MoE(block, hparams.n_embd, hparams.experts)
