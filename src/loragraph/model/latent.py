"""The numbers of multi-head latent attention (deepseek2), with llama.cpp's defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from loragraph.model.experts import ExpertParams, Gating, read_experts
from loragraph.model.hparams import HParams, inverse_sqrt, read_hparams
from loragraph.model.keys import MAX_SIZE, Keys
from loragraph.model.rope import NORM, rope_scaling

_GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class LatentHParams(HParams):
    """The numbers of latent attention beside the generic ones."""

    n_latent: int = 0  # the vector that K and V of all heads are made from
    n_latent_q: int = 0  # the same for q; 0: q is one matrix
    n_nope: int = 0  # values of a q or k head that do not turn
    n_value: int = 0  # values of a head's V
    n_dense_lead: int = 0

    @property
    def n_key(self) -> int:
        """Values of a q or k head before k_b is multiplied in."""
        return self.n_nope + self.rope.n_rot


def read_latent_hparams(keys: Keys) -> LatentHParams:
    """deepseek2's keys: the generic ones, those of latent attention, the experts'."""
    _refuse(keys)
    generic = read_hparams(keys, NORM, rotates_part=True, unlike_heads=True)
    n_key = keys.integer("attention.key_length_mla", default=0, high=MAX_SIZE)
    n_value = keys.integer("attention.value_length_mla", default=0, high=MAX_SIZE)
    if bool(n_key) != bool(n_value):
        raise keys.error(
            "expected key_length_mla and value_length_mla, got one of them",
            "attention.key_length_mla",
        )
    n_latent = keys.integer("attention.kv_lora_rank", low=1, high=MAX_SIZE)
    absorbed = bool(n_key)
    _check_cells(keys, generic, n_latent, absorbed=absorbed)
    n_key, n_value = n_key or generic.n_embd_head, n_value or generic.n_embd_head_v
    if n_key <= generic.rope.n_rot:
        raise keys.error(
            f"expected K heads of more than the {generic.rope.n_rot} values that turn, got {n_key}",
            "attention.key_length",
        )
    generic = _with_yarn(keys, replace(generic, v_in_k=absorbed), n_key)
    own = {
        "experts": _read_experts(keys, generic),
        "n_latent": n_latent,
        "n_latent_q": keys.integer("attention.q_lora_rank", default=0, high=MAX_SIZE),
        "n_nope": n_key - generic.rope.n_rot,
        "n_value": n_value,
        "n_dense_lead": keys.integer("leading_dense_block_count", default=0, high=generic.n_layer),
    }
    shared = {field.name: getattr(generic, field.name) for field in fields(HParams)}
    return LatentHParams(**{**shared, **own})


def _refuse(keys: Keys) -> None:
    if keys.real("attention.temperature_scale", default=0.0):
        raise keys.unsupported(
            "attention.temperature_scale: scores that depend on the position", "temperature tuning"
        )
    if keys.integer("nextn_predict_layers", default=0):
        raise keys.unsupported(
            "nextn_predict_layers: layers that predict further tokens", "multi-token prediction"
        )


def _check_cells(keys: Keys, generic: HParams, n_latent: int, *, absorbed: bool) -> None:
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
    expected = (n_latent + generic.rope.n_rot, n_latent)
    if sizes != expected:
        raise keys.error(
            f"expected key_length and value_length {expected[0]} and {expected[1]} of a latent "
            f"vector of {n_latent}, got {sizes[0]} and {sizes[1]}",
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
    experts = read_experts(keys, 0, own_width=True)
    # A file from before the key says nothing; one model of that time takes the sigmoid.
    is_glm_lite = hparams.n_layer in (47, 48) and hparams.n_vocab == 154880
    gating = keys.integer("expert_gating_func", default=0) or (2 if is_glm_lite else 1)
    if gating not in _GATINGS:
        raise keys.unsupported(
            f"{keys.full('expert_gating_func')}: expected {sorted(_GATINGS)}, got {gating}",
            what=f"expert_gating_func {gating}",
        )
    return replace(
        experts,
        gating=_GATINGS[gating],
        norm_weights=keys.boolean("expert_weights_norm", default=False),
        weights_scale=keys.real("expert_weights_scale", default=0.0),
        n_ff_shared=experts.n_ff * keys.integer("expert_shared_count", low=1, high=1024),
    )
