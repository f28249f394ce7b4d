"""The header's numbers of rotary embedding, with llama.cpp's defaults (llama-model.cpp)."""

from __future__ import annotations

import numpy as np

from loragraph.ggml.ops import Rope
from loragraph.model.keys import Keys

NORM = 0
"""Pairs (2i, 2i + 1); GGUF's q and k rows are ordered for it."""
NEOX = 2
"""Pairs (i, i + n_rot / 2)."""

_SCALINGS = ("none", "linear", "yarn", "longrope")
_FACTORS = (2.0**-10, 2.0**20)  # outside, YaRN's corrections leave f32


def rope_scaling(keys: Keys) -> str:
    """How positions are stretched: "none", "linear", "yarn" or "longrope"."""
    kind = keys.string("rope.scaling.type", default="linear")
    if kind not in _SCALINGS:
        raise keys.unsupported(
            f"{keys.full('rope.scaling.type')}: expected none, linear, yarn or longrope, "
            f"got {kind!r}",
            what=f"rope scaling {kind}",
        )
    return kind


def read_rope(keys: Keys, n_embd_head: int, n_ctx_train: int, mode: int, *, part: bool) -> Rope:
    """`mode` is the family's pairing; `part` allows fewer than all values of a head to turn."""
    n_rot = keys.integer("rope.dimension_count", default=n_embd_head, low=1)
    if n_rot % 2 or n_rot > n_embd_head or (n_rot != n_embd_head and not part):
        most = "at most " if part else ""
        raise keys.error(
            f"invalid n_rot: {n_rot}, expected {most}{n_embd_head} (even)", "rope.dimension_count"
        )
    kind = rope_scaling(keys)
    factor = _factor(keys)
    freq_scale = (
        1.0 if factor == 0.0 or kind == "none" else float(np.float32(1) / np.float32(factor))
    )
    yarn = kind == "yarn"
    attn_factor = keys.real("rope.scaling.attn_factor", default=1.0)
    return Rope(
        n_rot=n_rot,
        mode=mode,
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", default=0) or n_ctx_train,
        freq_base=keys.real("rope.freq_base", default=10000.0, low=1e-30),
        freq_scale=freq_scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=attn_factor * (_yarn_attn_factor(freq_scale) if yarn else 1.0),
    )


def _factor(keys: Keys) -> float:
    """The stretch of positions; 0 = none, as in llama.cpp."""
    name, old_name = "rope.scaling.factor", "rope.scale_linear"
    name = old_name if name not in keys and old_name in keys else name
    low, high = _FACTORS
    if keys.real(name, default=0.0) == 0:
        return 0.0
    return keys.real(name, low=low, high=high)


def _yarn_attn_factor(freq_scale: float) -> float:
    """What llama-context.cpp hands to ggml, in float32: ggml itself multiplies by 1 + 0.1 ln(f).

    The keys yarn_log_multiplier and yarn_beta_* belong to other families and are read there.
    """
    one, tenth = np.float32(1), np.float32(0.1)
    factor = one / np.float32(freq_scale)
    mscale = one if factor <= 1 else tenth * np.log(factor) + one
    return float(mscale * (one / (one + tenth * np.log(factor))))
