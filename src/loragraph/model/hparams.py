"""GGUF metadata -> the numbers of a model, with llama.cpp's defaults (llama-model.cpp).

Here stands what most families share; what a family alone has, it reads in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.ops import Rope
from loragraph.model.experts import ExpertParams
from loragraph.model.keys import MAX_SIZE, Keys
from loragraph.model.rope import read_rope, rope_scaling

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class HParams:
    """The numbers of a model that its graph needs; tuples hold one value a layer."""

    arch: str
    name: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_embd_head: int  # of q and k
    n_embd_head_v: int
    n_expert: int
    n_expert_used: int
    norm_rms_eps: float
    rope: Rope
    rope_scaling: str
    attention_scale: float  # of q k, 1 / sqrt(n_embd_head) unless the family says otherwise
    windows: tuple[int, ...]  # newest positions that a layer sees, itself included; 0: all
    rope_local: Rope | None = None  # of the layers with a window; None: as the others
    attention_softcap: float = 0.0  # c tanh(s / c) of the scores; 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    has_positions: bool = True  # False: nothing is rotated
    v_in_k: bool = False  # V is the first values of K's one head: cells hold K alone
    experts: ExpertParams | None = None

    def n_embd_k(self, il: int) -> int:
        """Width of a cell's K in layer `il`."""
        return self.n_head_kv[il] * self.n_embd_head

    def n_embd_v(self, il: int) -> int:
        """Width of a cell's V in layer `il`, 0 where it lies in K."""
        return 0 if self.v_in_k else self.n_head_kv[il] * self.n_embd_head_v

    def rope_of(self, il: int) -> Rope:
        """The rotation in layer `il`."""
        return self.rope if self.rope_local is None or not self.windows[il] else self.rope_local


def read_hparams(
    keys: Keys,
    rope_mode: int,
    *,
    rotates_part: bool = False,
    unlike_heads: bool = False,
    needs_ffn: bool = True,
) -> HParams:
    """The generic keys; `rope_mode` is the family's pairing (rope.NORM or rope.NEOX).

    `rotates_part` allows that not all of a head turns, `unlike_heads` that V's are of another size.
    `needs_ffn`: the width of a dense feed-forward must be there.
    Raises GGUFError for a missing, mistyped or absurd key.
    """
    n_layer = keys.integer("block_count", low=1, high=MAX_LAYERS)
    n_embd = keys.integer("embedding_length", low=1, high=MAX_SIZE)
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, default=n_head)
    for il, (heads, heads_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if heads % heads_kv:
            raise keys.error(
                f"expected the number of heads to be a multiple of the K/V heads, "
                f"got {heads} and {heads_kv} in layer {il}",
                "attention.head_count_kv",
            )
    n_embd_head, n_embd_head_v = _head_sizes(keys, n_embd, n_head[0], unlike=unlike_heads)
    n_ctx_train = keys.integer("context_length", low=1)
    _refuse_unlike(keys, n_embd_head)
    return HParams(
        arch=keys.arch,
        name=keys.file.string("general.name", default=keys.file.path.stem),
        n_vocab=_n_vocab(keys.file, keys),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=keys.per_layer("feed_forward_length", n_layer, None if needs_ffn else (0,) * n_layer),
        n_embd_head=n_embd_head,
        n_embd_head_v=n_embd_head_v,
        n_expert=keys.integer("expert_count", default=0, high=4096),
        n_expert_used=keys.integer("expert_used_count", default=0, high=4096),
        norm_rms_eps=keys.real("attention.layer_norm_rms_epsilon", low=0),
        rope=read_rope(keys, n_embd_head, n_ctx_train, rope_mode, part=rotates_part),
        rope_scaling=rope_scaling(keys),
        attention_scale=inverse_sqrt(n_embd_head),
        windows=(0,) * n_layer,
    )


def read_windows(keys: Keys, n_layer: int, n_swa: int, period: int) -> tuple[int, ...]:
    """The windows of layers that see `n_swa` positions in turn with layers that see all.

    `attention.sliding_window_pattern` is a bool a layer (true: a window), or a period, in which
    only the last layer sees all; 0 gives every layer a window. `period` is the family's own.
    """
    name = "attention.sliding_window_pattern"
    if keys.is_array(name):
        local = keys.flags(name, n_layer)
    else:
        period = keys.integer(name, default=period, high=1024)
        local = tuple(period == 0 or il % period < period - 1 for il in range(n_layer))
    return tuple(n_swa if one else 0 for one in local)


def square_root(n: int) -> float:
    """sqrt(n), in float32 as llama.cpp has it."""
    return float(np.sqrt(np.float32(n)))


def inverse_sqrt(n: int) -> float:
    """1 / sqrt(n), rounded as llama.cpp rounds it: twice in float32."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


def _head_sizes(keys: Keys, n_embd: int, n_head: int, *, unlike: bool) -> tuple[int, int]:
    """Values of a K head and of a V head."""
    if "attention.key_length" not in keys and n_embd % n_head:
        raise keys.error(
            f"expected an embedding length that is a multiple of the {n_head} heads, got {n_embd}",
            "embedding_length",
        )
    n_k = keys.integer("attention.key_length", default=n_embd // n_head, low=1, high=MAX_SIZE)
    n_v = keys.integer("attention.value_length", default=n_embd // n_head, low=1, high=MAX_SIZE)
    if n_k != n_v and not unlike:
        raise keys.unsupported(
            f"K heads of {n_k} and V heads of {n_v} values", what="unlike K and V heads"
        )
    return n_k, n_v


def _refuse_unlike(keys: Keys, n_embd_head: int) -> None:
    """What would change the forward pass and no family here has."""
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        if keys.integer(name, default=n_embd_head) != n_embd_head:
            raise keys.unsupported(
                f"{keys.full(name)} unlike the other layers' {n_embd_head}",
                what="layers with unlike heads",
            )
    if not keys.boolean("attention.causal", default=True):
        raise keys.unsupported(
            f"{keys.full('attention.causal')} is false: a model that reads text and writes none",
            what="attention in both directions",
        )


def _n_vocab(file: GGUFFile, keys: Keys) -> int:
    """The tokens there are; as in llama.cpp, the key counts only where there are none."""
    tokens = "tokenizer.ggml.tokens"
    if tokens not in file and "vocab_size" in keys:
        return keys.integer("vocab_size", low=1)
    return max(1, file.array_length(tokens))
