"""general.architecture = gpt-oss: gpt-oss-20b and 120b.

Every weight has a bias. Heads have sinks: a score more that takes its share of the weights and adds
nothing. Every other layer sees a window. Experts are weighted by the softmax over the chosen ones
and bent by a clamped swiglu; in the released files they are MXFP4.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.experts import read_experts
from loragraph.model.hparams import HParams, read_hparams, read_windows
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights


class GptOss:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(models="gpt-oss-20b, gpt-oss-120b")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, the window and the experts'."""
        hparams = read_hparams(keys, NEOX, needs_ffn=False)
        experts = read_experts(keys, 0, own_width=True)
        experts = replace(experts, gating="softmax of the chosen", norm_weights=False)
        base = keys.real("rope.freq_base_swa", default=hparams.rope.freq_base, low=1e-30)
        n_swa = keys.integer("attention.sliding_window", low=1)
        return replace(
            hparams,
            experts=experts,
            windows=read_windows(keys, hparams.n_layer, n_swa, period=2),
            rope_local=replace(hparams.rope, freq_base=base),
        )

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [
            _Layer(Block(hparams, weights, il), hparams, il) for il in range(hparams.n_layer)
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
        rope = hparams.rope_of(il)
        q, k = b.rope(q, rope), b.rope(k, rope)
        out = b.attention(
            il, q, k, v, hparams.attention_scale, window=hparams.windows[il], sinks=layer.sinks
        )
        return layer.wo(b, out)


class _Layer:
    def __init__(self, block: Block, hparams: HParams, il: int) -> None:
        assert hparams.experts is not None  # read_hparams read them
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.sinks = block.weights.vector(block.full("attn_sinks", "weight"), hparams.n_head[il])
        self.ffn_norm = block.norm("post_attention_norm")
        self.moe = MoE(block, hparams.n_embd, hparams.experts, oai=True)
