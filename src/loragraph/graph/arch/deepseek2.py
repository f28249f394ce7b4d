"""general.architecture = deepseek2: DeepSeek V2, V2-Lite, V3, R1 and their like.

Multi-head latent attention (arXiv 2405.04434): K and V of all heads are made from one short vector
a token. Files with `attn_k_b` and `attn_v_b` keep only that vector in the cells: k_b is multiplied
into q, v_b into what was attended, so all heads read one K whose first values are V. Older files
with `attn_kv_b` keep K and V of every head. Some first layers are dense, in the others experts are
chosen, at times group by group, beside a shared one.
"""

from __future__ import annotations

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends, GatedFFN, Linear, Norm
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.hparams import HParams
from loragraph.model.keys import Keys
from loragraph.model.latent import LatentHParams, read_latent_hparams
from loragraph.model.weights import Weights


class DeepSeek2:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(
        models="DeepSeek V2, V2-Lite, V3, R1, Kanana-2, GigaChat 3",
        unsupported=("temperature tuning (Mistral Large 3)", "layers that predict further tokens"),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The generic keys, those of latent attention, the experts'."""
        return read_latent_hparams(keys)

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        assert isinstance(hparams, LatentHParams)
        self.hparams: HParams = hparams
        self.ends = Ends(hparams, weights)
        self.layers = [
            _Layer(Block(hparams, weights, il), hparams, il) for il in range(hparams.n_layer)
        ]

    def build(self, b: Builder) -> Tensor:
        """Logits F32 [n_vocab, n_outputs]."""
        x = b.embed(self.ends.token_embd)
        for il, layer in enumerate(self.layers):
            attended = layer.attention(b, layer.attn_norm(b, x))
            if il == self.hparams.n_layer - 1:
                attended, x = b.output_rows(attended, x)
            x = b.ops.add(attended, x)
            x = b.ops.add(layer.ffn(b, layer.ffn_norm(b, x)), x)
        return self.ends.output(b, self.ends.output_norm(b, x))


class _Layer:
    def __init__(self, block: Block, hparams: LatentHParams, il: int) -> None:
        self.attn_norm = block.norm("attn_norm")
        self.attention: _Absorbed | _Expanded
        if hparams.v_in_k:
            self.attention = _Absorbed(block, hparams, il)
        else:
            self.attention = _Expanded(block, hparams, il)
        self.ffn_norm = block.norm("ffn_norm")
        self.ffn: GatedFFN | MoE
        if il < hparams.n_dense_lead:
            self.ffn = block.gated_ffn()
        else:
            assert hparams.experts is not None  # read_hparams read them
            self.ffn = MoE(block, hparams.n_embd, hparams.experts)


class _Latent:
    """What both forms of the attention begin with: q, the latent vector, and the k that turns."""

    def __init__(self, block: Block, hparams: LatentHParams, il: int) -> None:
        self.hparams = hparams
        self.il = il
        n_q = hparams.n_head[il] * hparams.n_key
        self.q_a: tuple[Linear, Norm] | None = None
        if hparams.n_latent_q and not block.weights.has(block.full("attn_q", "weight")):
            q_a = block.linear("attn_q_a", hparams.n_embd, hparams.n_latent_q)
            self.q_a = q_a, block.norm("attn_q_a_norm", hparams.n_latent_q)
            self.q = block.linear("attn_q_b", hparams.n_latent_q, n_q)
        else:
            self.q = block.linear("attn_q", hparams.n_embd, n_q)
        n_both = hparams.n_latent + hparams.rope.n_rot
        self.kv_a = block.linear("attn_kv_a_mqa", hparams.n_embd, n_both)
        self.kv_a_norm = block.norm("attn_kv_a_norm", hparams.n_latent)
        self.wo = block.linear("attn_output", hparams.n_head[il] * hparams.n_value, hparams.n_embd)

    def queries(self, b: Builder, x: Tensor) -> Tensor:
        """q F32 [n_key, n_head, n], not turned yet."""
        if self.q_a is not None:
            q_a, norm = self.q_a
            x = norm(b, q_a(b, x))
        return b.heads(self.q(b, x), self.hparams.n_head[self.il])

    def latent(self, b: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latent vector F32 [n_latent, n], and the turned k of all heads F32 [n_rot, 1, n]."""
        hparams, n = self.hparams, x.ne[1]
        both = self.kv_a(b, x)
        row = 4 * both.ne[0]  # F32
        latent = b.ops.view(both, (hparams.n_latent, n), (row,))
        k = b.ops.view(both, (hparams.rope.n_rot, 1, n), (row, row), 4 * hparams.n_latent)
        return self.kv_a_norm(b, latent), b.rope(k, hparams.rope)


class _Absorbed(_Latent):
    """All heads read one K: the latent vector and the turned k. V is the latent vector."""

    def __init__(self, block: Block, hparams: LatentHParams, il: int) -> None:
        super().__init__(block, hparams, il)
        n_latent, n_head, weights = hparams.n_latent, hparams.n_head[il], block.weights
        k_b, v_b = block.full("attn_k_b", "weight"), block.full("attn_v_b", "weight")
        self.k_b = weights.heads(k_b, hparams.n_nope, n_latent, n_head)
        self.v_b = weights.heads(v_b, n_latent, hparams.n_value, n_head)

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        hparams, n = self.hparams, x.ne[1]
        q = self.queries(b, x)
        n_key, n_head = q.ne[:2]
        strides = (4 * n_key, 4 * n_key * n_head)  # F32
        q_nope = b.ops.view(q, (hparams.n_nope, n_head, n), strides)
        q_rot = b.ops.view(q, (hparams.rope.n_rot, n_head, n), strides, 4 * hparams.n_nope)
        latent, k_rot = self.latent(b, x)
        q = b.ops.concat(b.linear_heads(self.k_b, q_nope), b.rope(q_rot, hparams.rope))
        v = b.ops.reshape(latent, hparams.n_latent, 1, n)
        k = b.ops.concat(v, k_rot)
        out = b.attention(self.il, q, k, v, hparams.attention_scale)
        out = b.linear_heads(self.v_b, b.heads(out, n_head))
        return self.wo(b, b.ops.reshape(out, n_head * hparams.n_value, n))


class _Expanded(_Latent):
    """K and V of every head, made from the latent vector."""

    def __init__(self, block: Block, hparams: LatentHParams, il: int) -> None:
        super().__init__(block, hparams, il)
        n_out = hparams.n_head[il] * (hparams.n_nope + hparams.n_value)
        self.kv_b = block.linear("attn_kv_b", hparams.n_latent, n_out)

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        hparams, n, n_head = self.hparams, x.ne[1], self.hparams.n_head[self.il]
        q = b.rope(self.queries(b, x), hparams.rope, offset=hparams.n_nope)
        latent, k_rot = self.latent(b, x)
        kv = self.kv_b(b, latent)
        n_nope, n_value = hparams.n_nope, hparams.n_value
        strides = (4 * (n_nope + n_value), 4 * kv.ne[0])  # F32
        k_nope = b.ops.view(kv, (n_nope, n_head, n), strides)
        v = b.ops.cont(b.ops.view(kv, (n_value, n_head, n), strides, 4 * n_nope))
        k = b.ops.concat(k_nope, b.ops.repeat_heads(k_rot, n_head))
        return self.wo(b, b.attention(self.il, q, k, v, hparams.attention_scale))
