"""general.architecture = gemma2: Gemma 2.

Gemma with a norm behind attention and feed-forward as well as before them, scores and logits
within soft caps, and every other layer seeing a window of the newest positions alone.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends
from loragraph.graph.builder import Builder
from loragraph.model.hparams import (
    HParams,
    inverse_sqrt,
    read_hparams,
    read_windows,
    square_root,
)
from loragraph.model.keys import Keys
from loragraph.model.rope import NEOX
from loragraph.model.weights import Weights

_N_SWA = 4096
_N_LAYER_27B = 46


class Gemma2:
    """The family's tensors and its graph."""

    about = About(models="Gemma 2")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, window, caps, and the local layers' rope base where it is another."""
        hparams = read_hparams(keys, NEOX, rotates_part=True)
        n_swa = keys.integer("attention.sliding_window", default=_N_SWA, low=1)
        freq_base = keys.real("rope.freq_base_swa", default=hparams.rope.freq_base, low=1e-30)
        scale = hparams.attention_scale
        if hparams.n_layer == _N_LAYER_27B:  # the 27B has heads narrower than its scale says
            scale = inverse_sqrt(hparams.n_embd // hparams.n_head[0])
        return replace(
            hparams,
            embedding_scale=square_root(hparams.n_embd),
            attention_scale=scale,
            windows=read_windows(keys, hparams.n_layer, n_swa, period=2),
            rope_local=replace(hparams.rope, freq_base=freq_base),
            attention_softcap=keys.real("attn_logit_softcapping", default=50.0, low=1e-6),
            logit_softcap=keys.real("final_logit_softcapping", default=30.0, low=1e-6),
        )

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [_Layer(Block(hparams, weights, il)) for il in range(hparams.n_layer)]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        hparams = self.hparams
        x = b.ops.scale(b.embed(self.ends.token_embd), hparams.embedding_scale)
        for il, layer in enumerate(self.layers):
            attended = self._attention(b, il, layer.attn_norm(b, x))
            if il == hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(layer.post_attention_norm(b, attended), x)
            fed = layer.ffn(b, layer.ffn_norm(b, x))
            x = b.ops.add(layer.post_ffw_norm(b, fed), x)
        logits = self.ends.output(b, self.ends.output_norm(b, x))
        return b.softcap(logits, hparams.logit_softcap)

    def _attention(self, b: Builder, il: int, x: Tensor) -> Tensor:
        hparams, layer = self.hparams, self.layers[il]
        rope = hparams.rope_of(il)
        q, k, v = layer.qkv(b, x)
        q, k = b.rope(q, rope), b.rope(k, rope)
        q = b.ops.scale(q, hparams.attention_scale)
        window, softcap = hparams.windows[il], hparams.attention_softcap
        return layer.wo(b, b.attention(il, q, k, v, 1.0, window=window, softcap=softcap))


class _Layer:
    def __init__(self, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.wo = block.attention_output()
        self.post_attention_norm = block.norm("post_attention_norm")
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.gated_ffn(gelu=True)
        self.post_ffw_norm = block.norm("post_ffw_norm")
