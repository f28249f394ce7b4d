"""general.architecture = gemma3: Gemma 3, text.

Gemma 2 with an RMS norm of each head of q and k in place of the scores' soft cap; five layers see
a window, with positions of their own rope base, the sixth sees all.
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

_PERIOD = 6
_LOCAL_FREQ_BASE = 10000.0
_N_LAYER_27B = 62


class Gemma3:
    """The family's tensors and its graph."""

    about = About(
        models="Gemma 3 (text)",
        real=("Gemma-3-270M Q4_K_M",),
        unsupported=("images", "embedding models (dense_2, dense_3)"),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, window, pattern, the local layers' rope base, the logits' cap."""
        hparams = read_hparams(keys, NEOX, rotates_part=True)
        n_swa = keys.integer("attention.sliding_window", default=0)
        if n_swa:
            freq_base = keys.real("rope.freq_base_swa", default=_LOCAL_FREQ_BASE, low=1e-30)
            # Stretched positions (rope.scaling.factor) belong to the layers that see all.
            rope_local = replace(hparams.rope, freq_base=freq_base, freq_scale=1.0)
            windows = read_windows(keys, hparams.n_layer, n_swa, _PERIOD)
            hparams = replace(hparams, rope_local=rope_local, windows=windows)
        if hparams.n_layer == _N_LAYER_27B:  # the 27B has heads narrower than its scale says
            scale = inverse_sqrt(hparams.n_embd // hparams.n_head[0])
            hparams = replace(hparams, attention_scale=scale)
        return replace(
            hparams,
            embedding_scale=square_root(hparams.n_embd),
            logit_softcap=keys.real("final_logit_softcapping", default=0.0, low=0),
        )

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        for name in ("dense_2.weight", "dense_3.weight"):
            weights.refuse(name, "an embedding model gives no logits")
        self.hparams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [
            _Layer(hparams, Block(hparams, weights, il)) for il in range(hparams.n_layer)
        ]

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
        q, k = b.rope(layer.q_norm(b, q), rope), b.rope(layer.k_norm(b, k), rope)
        q = b.ops.scale(q, hparams.attention_scale)
        return layer.wo(b, b.attention(il, q, k, v, 1.0, window=hparams.windows[il]))


class _Layer:
    def __init__(self, hparams: HParams, block: Block) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.qkv = block.qkv()
        self.q_norm = block.norm("attn_q_norm", hparams.n_embd_head)
        self.k_norm = block.norm("attn_k_norm", hparams.n_embd_head)
        self.wo = block.attention_output()
        self.post_attention_norm = block.norm("post_attention_norm")
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn = block.gated_ffn(gelu=True)
        self.post_ffw_norm = block.norm("post_ffw_norm")
