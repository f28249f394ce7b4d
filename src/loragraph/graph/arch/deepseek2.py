"""general.architecture = deepseek2: DeepSeek V2, V2-Lite, V3, R1 and their like.

Multi-head latent attention (arXiv 2405.04434): K and V of all heads are made from one short vector
a token. Files with `attn_k_b` and `attn_v_b` keep only that vector in the cells: k_b is multiplied
into q, v_b into what was attended, so all heads read one K whose first values are V. Older files
with `attn_kv_b` keep K and V of every head. Some first layers are dense, in the others experts are
chosen, at times group by group, beside a shared one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.family import About
from loragraph.graph.blocks import Block, Ends, GatedFFN, Linear, Norm
from loragraph.graph.builder import Builder
from loragraph.graph.experts import MoE
from loragraph.model.experts import (
    ExpertParams,
    Gating,
    read_counts,
    read_expert_width,
    read_groups,
)
from loragraph.model.hparams import HParams, inverse_sqrt, read_hparams
from loragraph.model.keys import MAX_SIZE, Keys
from loragraph.model.rope import NORM, rope_scaling
from loragraph.model.weights import Weights

_GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class DeepSeek2HParams(HParams):
    """The numbers of latent attention beside the generic ones."""

    n_lora_kv: int = 0  # the vector that K and V of all heads are made from
    n_lora_q: int = 0  # the same for q; 0: q is one matrix
    n_nope: int = 0  # values of a q or k head that do not turn
    n_value: int = 0  # values of a head's V
    n_dense_lead: int = 0

    @property
    def n_key(self) -> int:
        """Values of a q or k head before k_b is multiplied in."""
        return self.n_nope + self.rope.n_rot


class DeepSeek2:
    """The family's tensors, asked for by name and shape, and its graph."""

    about = About(
        models="DeepSeek V2, V2-Lite, V3, R1, Kanana-2, GigaChat 3",
        unsupported=("temperature tuning (Mistral Large 3)", "layers that predict further tokens"),
    )

    @staticmethod
    def read_hparams(keys: Keys) -> DeepSeek2HParams:
        """The generic keys, those of latent attention, the experts'."""
        _refuse(keys)
        generic = read_hparams(keys, NORM, rotates_part=True, unlike_heads=True)
        n_key = keys.integer("attention.key_length_mla", default=0, high=MAX_SIZE)
        n_value = keys.integer("attention.value_length_mla", default=0, high=MAX_SIZE)
        if bool(n_key) != bool(n_value):
            raise keys.error(
                "expected key_length_mla and value_length_mla, got one of them",
                "attention.key_length_mla",
            )
        n_lora_kv = keys.integer("attention.kv_lora_rank", low=1, high=MAX_SIZE)
        absorbed = bool(n_key)
        _check_cells(keys, generic, n_lora_kv, absorbed=absorbed)
        n_key, n_value = n_key or generic.n_embd_head, n_value or generic.n_embd_head_v
        if n_key <= generic.rope.n_rot:
            raise keys.error(
                f"expected K heads of more than the {generic.rope.n_rot} values that turn, "
                f"got {n_key}",
                "attention.key_length",
            )
        generic = _with_yarn(keys, replace(generic, v_in_k=absorbed), n_key)
        own = {
            "experts": _read_experts(keys, generic),
            "n_lora_kv": n_lora_kv,
            "n_lora_q": keys.integer("attention.q_lora_rank", default=0, high=MAX_SIZE),
            "n_nope": n_key - generic.rope.n_rot,
            "n_value": n_value,
            "n_dense_lead": keys.integer(
                "leading_dense_block_count", default=0, high=generic.n_layer
            ),
        }
        shared = {field.name: getattr(generic, field.name) for field in fields(HParams)}
        return DeepSeek2HParams(**{**shared, **own})

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        assert isinstance(hparams, DeepSeek2HParams)
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
    def __init__(self, block: Block, hparams: DeepSeek2HParams, il: int) -> None:
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

    def __init__(self, block: Block, hparams: DeepSeek2HParams, il: int) -> None:
        self.hparams = hparams
        self.il = il
        n_q = hparams.n_head[il] * hparams.n_key
        self.q_a: tuple[Linear, Norm] | None = None
        if hparams.n_lora_q and not block.weights.has(block.full("attn_q", "weight")):
            q_a = block.linear("attn_q_a", hparams.n_embd, hparams.n_lora_q)
            self.q_a = q_a, block.norm("attn_q_a_norm", hparams.n_lora_q)
            self.q = block.linear("attn_q_b", hparams.n_lora_q, n_q)
        else:
            self.q = block.linear("attn_q", hparams.n_embd, n_q)
        n_latent = hparams.n_lora_kv + hparams.rope.n_rot
        self.kv_a = block.linear("attn_kv_a_mqa", hparams.n_embd, n_latent)
        self.kv_a_norm = block.norm("attn_kv_a_norm", hparams.n_lora_kv)
        self.wo = block.linear("attn_output", hparams.n_head[il] * hparams.n_value, hparams.n_embd)

    def queries(self, b: Builder, x: Tensor) -> Tensor:
        """q F32 [n_key, n_head, n], not turned yet."""
        if self.q_a is not None:
            q_a, norm = self.q_a
            x = norm(b, q_a(b, x))
        return b.heads(self.q(b, x), self.hparams.n_head[self.il])

    def latent(self, b: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
        """The latent vector F32 [n_lora_kv, n], and the turned k of all heads F32 [n_rot, 1, n]."""
        hparams, n = self.hparams, x.ne[1]
        both = self.kv_a(b, x)
        row = 4 * both.ne[0]  # F32
        latent = b.ops.view(both, (hparams.n_lora_kv, n), (row,))
        k = b.ops.view(both, (hparams.rope.n_rot, 1, n), (row, row), 4 * hparams.n_lora_kv)
        return self.kv_a_norm(b, latent), b.rope(k, hparams.rope)


class _Absorbed(_Latent):
    """All heads read one K: the latent vector and the turned k. V is the latent vector."""

    def __init__(self, block: Block, hparams: DeepSeek2HParams, il: int) -> None:
        super().__init__(block, hparams, il)
        n_lora, n_head, weights = hparams.n_lora_kv, hparams.n_head[il], block.weights
        k_b, v_b = block.full("attn_k_b", "weight"), block.full("attn_v_b", "weight")
        self.k_b = weights.heads(k_b, hparams.n_nope, n_lora, n_head)
        self.v_b = weights.heads(v_b, n_lora, hparams.n_value, n_head)

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        hparams, n = self.hparams, x.ne[1]
        q = self.queries(b, x)
        n_key, n_head = q.ne[:2]
        strides = (4 * n_key, 4 * n_key * n_head)  # F32
        q_nope = b.ops.view(q, (hparams.n_nope, n_head, n), strides)
        q_rot = b.ops.view(q, (hparams.rope.n_rot, n_head, n), strides, 4 * hparams.n_nope)
        latent, k_rot = self.latent(b, x)
        q = b.ops.concat(b.linear_heads(self.k_b, q_nope), b.rope(q_rot, hparams.rope))
        v = b.ops.reshape(latent, hparams.n_lora_kv, 1, n)
        k = b.ops.concat(v, k_rot)
        out = b.attention(self.il, q, k, v, hparams.attention_scale)
        out = b.linear_heads(self.v_b, b.heads(out, n_head))
        return self.wo(b, b.ops.reshape(out, n_head * hparams.n_value, n))


class _Expanded(_Latent):
    """K and V of every head, made from the latent vector."""

    def __init__(self, block: Block, hparams: DeepSeek2HParams, il: int) -> None:
        super().__init__(block, hparams, il)
        n_out = hparams.n_head[il] * (hparams.n_nope + hparams.n_value)
        self.kv_b = block.linear("attn_kv_b", hparams.n_lora_kv, n_out)

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


def _refuse(keys: Keys) -> None:
    if keys.real("attention.temperature_scale", default=0.0):
        raise keys.unsupported(
            "attention.temperature_scale: scores that depend on the position", "temperature tuning"
        )
    if keys.integer("nextn_predict_layers", default=0):
        raise keys.unsupported(
            "nextn_predict_layers: layers that predict further tokens", "multi-token prediction"
        )


def _check_cells(keys: Keys, generic: HParams, n_lora_kv: int, *, absorbed: bool) -> None:
    """What a cell holds: one K head of latent vector and turned k, or heads of their own."""
    if not absorbed:
        if generic.n_head_kv != generic.n_head:
            raise keys.error(
                f"expected a K/V head for each of {generic.n_head[0]} heads, "
                f"got {generic.n_head_kv[0]}",
                "attention.head_count_kv",
            )
        return
    if set(generic.n_head_kv) != {1}:
        raise keys.error(
            f"expected one K/V head, got {max(generic.n_head_kv)}", "attention.head_count_kv"
        )
    sizes = (generic.n_embd_head, generic.n_embd_head_v)
    expected = (n_lora_kv + generic.rope.n_rot, n_lora_kv)
    if sizes != expected:
        raise keys.error(
            f"expected key_length and value_length {expected[0]} and {expected[1]} of a latent "
            f"vector of {n_lora_kv}, got {sizes[0]} and {sizes[1]}",
            "attention.key_length",
        )


def _with_yarn(keys: Keys, hparams: HParams, n_key: int) -> HParams:
    """The scale of the scores, which takes over what the rotation does not multiply by.

    llama.cpp's deepseek2.cpp in float32: yarn_log_multiplier is ten times too small in the files.
    """
    one, tenth = np.float32(1), np.float32(0.1)
    rope = hparams.rope
    log_multiplier = np.float32(keys.real("rope.scaling.yarn_log_multiplier", default=0.0)) / tenth
    log_factor = np.log(one / np.float32(rope.freq_scale))
    if rope_scaling(keys) == "yarn" and log_multiplier:
        given = np.float32(keys.real("rope.scaling.attn_factor", default=1.0))
        attn_factor = (one / (one + tenth * log_factor)) * given
        rope = replace(rope, attn_factor=float(attn_factor))
    original = np.float32(rope.attn_factor) * (one + tenth * log_factor)
    mscale = original * (one + tenth * log_multiplier * log_factor)
    scale = float(mscale * mscale * np.float32(inverse_sqrt(n_key)))
    return replace(hparams, rope=rope, attention_scale=scale)


def _read_experts(keys: Keys, hparams: HParams) -> ExpertParams:
    n_expert, n_used = read_counts(keys)
    n_ff = read_expert_width(keys, 0, n_used)
    n_group, n_group_used = read_groups(keys, n_expert)
    # A file from before the key says nothing; one model of that time takes the sigmoid.
    is_glm_lite = hparams.n_layer in (47, 48) and hparams.n_vocab == 154880
    gating = keys.integer("expert_gating_func", default=0) or (2 if is_glm_lite else 1)
    if gating not in _GATINGS:
        raise keys.unsupported(
            f"{keys.full('expert_gating_func')}: expected {sorted(_GATINGS)}, got {gating}",
            what=f"expert_gating_func {gating}",
        )
    return ExpertParams(
        n_expert,
        n_used,
        n_ff,
        gating=_GATINGS[gating],
        norm_weights=keys.boolean("expert_weights_norm", default=False),
        weights_scale=keys.real("expert_weights_scale", default=0.0),
        n_group=n_group,
        n_group_used=n_group_used,
        n_ff_shared=n_ff * keys.integer("expert_shared_count", low=1, high=1024),
    )
