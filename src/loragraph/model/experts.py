"""The header's numbers of a mixture of experts, with llama.cpp's defaults and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragraph.model.keys import MAX_SIZE, Keys

MAX_EXPERTS = 4096

Gating = Literal["softmax", "sigmoid", "softmax of the chosen"]
"""How router logits become weights; the last takes the softmax over the chosen experts alone."""


@dataclass(frozen=True, slots=True)
class ExpertParams:
    """How many experts there are and how a token's are chosen and weighted."""

    n_expert: int
    n_used: int  # experts a token
    n_ff: int  # width of one expert
    gating: Gating = "softmax"
    norm_weights: bool = True  # a token's weights are made to sum to 1
    weights_scale: float = 1.0
    n_group: int = 1  # groups of experts, the best of which are searched
    n_group_used: int = 1
    n_ff_shared: int = 0  # width of the expert that every token uses; 0: none


def read_experts(keys: Keys, n_ff: int, *, own_width: bool) -> ExpertParams:
    """The keys that all families share; GGUFError for what is missing or absurd.

    `n_ff` is the width of a dense feed-forward, 0 where there is none. With `own_width` experts
    have `expert_feed_forward_length`, or without it what llama.cpp makes of `n_ff`.
    """
    n_expert = keys.integer("expert_count", low=1, high=MAX_EXPERTS)
    n_used = keys.integer("expert_used_count", low=1, high=n_expert)
    if own_width:
        default = n_ff // n_used or None
        n_ff = keys.integer("expert_feed_forward_length", default=default, low=1, high=MAX_SIZE)
    n_group, n_group_used = _groups(keys, n_expert)
    return ExpertParams(n_expert, n_used, n_ff, n_group=n_group, n_group_used=n_group_used)


def _groups(keys: Keys, n_expert: int) -> tuple[int, int]:
    """Groups of experts and those that are searched; 1 and 1 where there are none."""
    n_group = keys.integer("expert_group_count", default=0, high=n_expert)
    if n_group <= 1:
        return 1, 1
    if n_expert % n_group or n_expert // n_group < 2:
        raise keys.error(
            f"expected groups of equal size, at least 2, of {n_expert} experts, got {n_group}",
            "expert_group_count",
        )
    return n_group, keys.integer("expert_group_used_count", low=1, high=n_group - 1)
