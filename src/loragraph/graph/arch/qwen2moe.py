"""general.architecture = qwen2moe: Qwen1.5-MoE and Qwen2-57B-A14B.

Like qwen2, with biases of q, k and v; a feed-forward is a mixture of experts, softmax over all of
them and the weights as they are, plus sigmoid(g x) times an expert that every token uses.
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
from loragraph.model.keys import MAX_SIZE, Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights


class Qwen2MoE:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, and the experts'."""
        hparams = read_hparams(keys, NEOX, needs_ffn=False)
        n_ff_shared = keys.integer(
            "expert_shared_feed_forward_length",
            default=hparams.n_ff[0] or None,
            low=1,
            high=MAX_SIZE,
        )
        experts = read_experts(keys, hparams.n_ff[0], own_width=True)
        experts = replace(experts, norm_weights=False, n_ff_shared=n_ff_shared)
        return replace(hparams, experts=experts)

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
            x = b.ops.add(layer.ffn(b, layer.ffn_norm(b, x)), x)
        return self.ends.output(b, self.ends.output_norm(b, x))

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        q, k, v = layer.qkv(b, x)
        q, k = b.rope(q, hparams.rope), b.rope(k, hparams.rope)
        return layer.wo(b, b.attention(il, q, k, v, hparams.attention_scale))


class _Layer:
    def __init__(self, block: Block, hparams: HParams) -> None:
        experts = hparams.experts
        assert experts is not None  # read_hparams read them
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.ffn_norm = block.norm("ffn_norm")
        self.moe = MoE(block, hparams.n_embd, experts)
        self.shared_gate = block.linear("ffn_gate_inp_shexp", hparams.n_embd, 1)

    def ffn(self, b: Builder, x: Tensor) -> Tensor:
        assert self.moe.shared is not None  # its width is at least 1
        # llama.cpp divides silu(g) by g, which is NaN where g is 0.
        gate = b.ops.sigmoid(self.shared_gate(b, x))
        shared = b.ops.mul(self.moe.shared(b, x), gate)
        return b.ops.add(self.moe.chosen(b, x), shared)
