"""Tiny base models of many forms, and files like them that are wrong in one or a few places."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.fuzz.mutations import KINDS, Change, header_bytes, mutate
from tests.gguf_bytes import RawTensor, gguf_bytes
from tests.tiny import TinyLlama, TinyModel
from tests.tiny_experts import (
    STACKS,
    TinyDeepSeek2,
    TinyGptOss,
    TinyGraniteMoE,
    TinyMixtral,
    TinyQwen2MoE,
    TinyQwen3MoE,
)
from tests.tiny_families import VARIANTS
from tests.tiny_fold import Folding, folded_tensors

Q = GGMLQuantizationType
Pairs = list[tuple[str, Any]]


@dataclass(frozen=True)
class Base:
    """A right model, taken apart and as a file."""

    pairs: Pairs  # its metadata
    tensors: list[RawTensor]

    @classmethod
    def of(cls, model: TinyModel) -> Base:
        """A tiny model."""
        return cls(list(model.metadata().items()), model.raw_tensors())

    @cached_property
    def data(self) -> bytes:
        """The file."""
        return gguf_bytes(self.pairs, self.tensors)

    @cached_property
    def places(self) -> list[int]:
        """Where keys and tensor names begin in the file."""
        names = [name for name, _ in self.pairs] + [each.name for each in self.tensors]
        return [self.data.find(name.encode()) for name in names]


def bases() -> list[Base]:
    """Models of every family, with each option of llama and each kind of weight type."""
    wide: dict[str, Any] = {"n_layer": 1, "n_embd": 256, "n_ff": 256, "n_head": 4}
    forms = [
        TinyLlama(n_layer=1),
        TinyLlama(n_layer=1, tied=True, vocab="bpe"),
        TinyLlama(attn_bias=True, ffn_bias=True, weight_type=Q.F16),
        TinyLlama(n_layer=1, rope_freqs=True, scales=True, weight_type=Q.BF16),
        TinyLlama(n_layer=1, rope_scaling="yarn", vocab="bpe", weight_type=Q.Q8_0),
        TinyLlama(n_layer=1, rope_scaling="linear", head_dim=32, weight_type=Q.Q4_0),
        TinyLlama(n_layer=1, weight_type=Q.Q4_1, types={"token_embd": Q.Q5_0}),
        TinyLlama(n_layer=1, tied=True, weight_type=Q.Q5_1, types={"ffn_up": Q.IQ4_NL}),
        TinyLlama(**wide, weight_type=Q.Q4_K, types={"output": Q.Q6_K}),
        TinyLlama(**wide, tied=True, weight_type=Q.Q2_K, types={"attn_v": Q.Q3_K}),
        TinyLlama(**wide, vocab="bpe", weight_type=Q.IQ4_XS, types={"ffn_up": Q.IQ2_XXS}),
        TinyLlama(**wide, weight_type=Q.Q5_K, types={"ffn_up": Q.TQ2_0, "ffn_gate": Q.IQ3_S}),
        TinyMixtral(n_layer=1, scales=True, weight_type=Q.Q4_0),
        TinyQwen2MoE(n_layer=1),
        TinyQwen3MoE(n_layer=1, n_expert=40, n_used=8, n_ff_exp=2),
        TinyGraniteMoE(n_layer=1, n_ff_shared=32, weight_type=Q.F16),
        TinyGptOss(n_layer=2, types=dict.fromkeys(STACKS, Q.MXFP4)),
        TinyDeepSeek2(n_layer=2, gating=2, selection_bias=True, norm_weights=True),
        TinyDeepSeek2(n_layer=2, absorbed=False, n_expert=8, n_group=4, n_group_used=2),
    ]
    folded = [(TinyLlama(n_layer=1), Folding(latent=True)), (TinyLlama(tied=True), _TIED)]
    shallow = [model for model in VARIANTS.values() if model.n_layer < 40]
    return [Base.of(form) for form in (*forms, *shallow)] + [_folded(*one) for one in folded]


_TIED = Folding(tied=True, block_size=16)


def _folded(model: TinyModel, folding: Folding) -> Base:
    pairs = model.metadata() | folding.metadata(model)
    return Base(list(pairs.items()), folded_tensors(model, folding))


def spoiled(rng: random.Random, base: Base) -> bytes:
    """The base with a few wrong places: in its bytes, in its structure, or in its weights."""
    kind = rng.random()
    if kind < 0.4:
        return mutate(base.data, [_change(rng, base) for _ in range(rng.choice((1, 1, 1, 2, 3)))])
    if kind < 0.8:
        return odd_model(rng, base)
    if kind < 0.9:
        return odd_sizes(rng).to_bytes()
    tensors = [_revalued(rng, t) if rng.random() < 0.3 else t for t in base.tensors]
    return gguf_bytes(base.pairs, tensors)


def odd_sizes(rng: random.Random) -> TinyLlama:
    """A right model with sizes and options that nobody uses."""
    n_head_kv = rng.choice((1, 2, 3))
    head_dim = rng.choice((2, 4, 6, 10, 16, 34, 64, 80, 256, 514))
    return TinyLlama(
        n_layer=rng.choice((1, 2)),
        n_embd=rng.choice((1, 2, 3, 7, 32, 33, 64, 96)),
        n_head=n_head_kv * rng.choice((1, 2, 5)),
        n_head_kv=n_head_kv,
        n_ff=rng.choice((1, 2, 3, 32, 33, 64)),
        n_vocab=rng.choice((261, 262, 301, 320)),
        head_dim=head_dim,
        tied=rng.random() < 0.5,
        attn_bias=rng.random() < 0.3,
        ffn_bias=rng.random() < 0.3,
        rope_freqs=rng.random() < 0.3,
        scales=rng.random() < 0.3,
        rope_scaling=rng.choice((None, "linear", "yarn")),
        rope_factor=rng.choice((1e-3, 0.5, 1.0, 40.0, 1e6)),
        rope_orig_ctx=rng.choice((1, 128, 2**31 - 1)),
        rope_base=rng.choice((1e-20, 1.0, 1e4, 1e30)),
        rms_eps=rng.choice((0.0, 1e-5, 1e30)),
        n_ctx_train=rng.choice((1, 512, 2**31 - 1)),
        weight_type=rng.choice((Q.F32, Q.F16, Q.BF16)),
        vocab=rng.choice(("spm", "bpe")),
        seed=rng.randrange(100),
    )


def _change(rng: random.Random, base: Base) -> Change:
    """One byte-level change; half of them behind the name of a key or tensor, where types are."""
    at = rng.random()
    if rng.random() < 0.5:
        place = rng.choice(base.places) + rng.randrange(48)
        at = min(place / header_bytes(base.data), 0.999)
    return Change(rng.choice(KINDS), at, rng.getrandbits(32), rng.random() < 0.1)


def odd_model(rng: random.Random, base: Base) -> bytes:
    """A container that is whole but for its counts, with odd metadata and tensors."""
    pairs, tensors = list(base.pairs), list(base.tensors)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        _spoil_metadata(rng, pairs)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        _spoil_tensors(rng, tensors)
    options: dict[str, Any] = {}
    if rng.random() < 0.1:
        options[rng.choice(("n_kv", "n_tensors"))] = rng.choice((0, 1, 2**31, 2**62, 2**64 - 1))
    if rng.random() < 0.1:
        options["alignment"] = rng.choice((1, 8, 16, 64, 4096))
        pairs.append(("general.alignment", np.uint32(options["alignment"])))
    return gguf_bytes(pairs, tensors, **options)


def _spoil_metadata(rng: random.Random, pairs: Pairs) -> None:
    if not pairs:
        return
    at = rng.randrange(len(pairs))
    key, value = pairs[at]
    arch = next((str(value) for key, value in pairs if key == "general.architecture"), "llama")
    other = rng.choice(KEYS).replace("llama.", f"{arch[:20]}.")
    match rng.randrange(8):
        case 0:
            del pairs[at]
        case 1:
            key = other
            pairs[:] = [*(pair for pair in pairs if pair[0] != key), (key, rng.choice(VALUES))]
        case 2:
            pairs[at] = (other, value)
        case 3:
            pairs.append((other, rng.choice(VALUES)))
        case 4:
            pairs[at] = (key, _near(rng, value))
        case _:
            pairs[at] = (key, rng.choice(VALUES))


def _near(rng: random.Random, value: Any) -> Any:
    """A value of the same kind, a little or very wrong."""
    near: Any
    if isinstance(value, bool | str):
        return rng.choice(("", "llama", "gpt2", "x" * 5000, value * 2)) if value else not value
    if isinstance(value, int):
        near = rng.choice((value + 1, max(value - 1, 0), value * 2, value // 2, 2**31))
        return min(near, 2**32 - 1)
    if isinstance(value, float):
        real = float(value)
        near = rng.choice((0.0, -real, real * 1e30, real * 1e-30, 1e-45, float("nan")))
        return 3e38 if abs(near) > 3e38 else near  # what f32 holds
    if not isinstance(value, Sequence) or not value:
        return rng.choice(VALUES)
    items, at = list(value), rng.randrange(len(value))
    match rng.randrange(5):
        case 0:
            items[at] = items[rng.randrange(len(items))]
        case 1:
            del items[at]
        case 2:
            items *= 2
        case 3:
            items[at] = rng.choice(("", "\0", "\udcff", " ", "▁" * 3000, "<0x41>"))
            if not isinstance(value[0], str):
                items[at] = rng.choice((-1, 0, 7, 2**31 - 1, float("nan"), float("inf")))
        case _:
            rng.shuffle(items)
    return items


def _spoil_tensors(rng: random.Random, tensors: list[RawTensor]) -> None:
    if not tensors:
        return
    at = rng.randrange(len(tensors))
    old = tensors[at]
    match rng.randrange(9):
        case 0:
            del tensors[at]
        case 1:
            tensors.append(old)
        case 2:
            tensors[at] = replace(old, name=rng.choice((*NAMES, rng.choice(tensors).name)))
        case 3:
            tensors[at] = replace(old, offset=rng.choice((0, 1, 16, 32, 2**31, 2**63, 2**64 - 1)))
        case 4:
            tensors[at] = replace(old, shape=_resized(rng, old.shape))
        case 5:
            tensors[at] = replace(old, data=old.data[: rng.randrange(len(old.data) + 1)])
        case 6:
            tensors.append(replace(old, name=rng.choice(NAMES)))
        case _:
            tensors[at] = _retyped(rng, old)


def _resized(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = (0, 1, 2, 31, 32, 64, 256, 2**20, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1)
    if rng.random() < 0.3:
        return tuple(reversed(shape))
    changed = tuple(rng.choice(sizes) if rng.random() < 0.5 else n for n in shape)
    return (*rng.choice(((), (1,), (1, 1), (2,))), *changed)


def _retyped(rng: random.Random, old: RawTensor) -> RawTensor:
    """Another type, mostly with as many bytes as that type needs."""
    if rng.random() < 0.2:
        return replace(old, type=rng.choice((*range(48), 2**31 - 1, 2**31, 2**32 - 1)))
    kind = rng.choice(list(GGML_QUANT_SIZES))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n_bytes = min(math.prod(old.shape) // block * block_bytes, 1 << 20)
    source = (old.data or bytes(64)) if rng.random() < 0.5 else rng.randbytes(64)
    return replace(old, type=int(kind), data=(source * (n_bytes // len(source) + 1))[:n_bytes])


def _revalued(rng: random.Random, old: RawTensor) -> RawTensor:
    """The same tensor with NaN, infinities or noise as its bytes."""
    n = len(old.data)
    match rng.randrange(3):
        case 0:
            data = bytes([rng.choice((0, 0x7C, 0x7F, 0x80, 0xFF))]) * n
        case 1:
            data = rng.randbytes(n)
        case _:
            at = rng.randrange(n)
            data = (old.data[:at] + rng.randbytes(16) + old.data[at + 16 :])[:n]
    return replace(old, data=data)


_EDGES = (0, 1, -1, 2, 3, 7, 2**16, 2**31 - 1)
VALUES: tuple[Any, ...] = (
    *_EDGES,
    *(2**31, 2**32 - 1, np.uint64(2**63 - 1), np.uint64(2**64 - 1), np.int64(-(2**63))),
    *(np.uint8(255), np.int8(-1), np.uint16(65535), np.int16(-1)),
    *(0.0, -0.0, 1.0, -1.5, 1e-45, 3e38, float("nan"), float("inf"), -float("inf")),
    *(np.float64(1e300), np.float64(1e-300), np.float64("nan")),
    *(True, False, "", "llama", "gpt2", "yarn", "none", "longrope", "adapter", "\0", "\udcff"),
    *([1, 2], [0], [2, 2], ["a"], ["", ""], [1.0, float("nan")]),
    *(np.empty(0, np.uint32), np.array([-1, 4], np.int32), np.zeros(2000, np.uint8)),
)
KEYS = (
    *("", "llama.vocab_size", "llama.expert_count", "llama.attention.key_length", "general.type"),
    *("llama.attention.value_length", "llama.rope.scaling.factor", "llama.rope.scaling.type"),
    *("llama.rope.scaling.attn_factor", "llama.rope.scale_linear", "llama.rope.freq_base"),
    *("llama.rope.scaling.original_context_length", "llama.attention.head_count_kv"),
    *("llama.attention.sliding_window", "llama.attention.sliding_window_pattern"),
    *("llama.attn_logit_softcapping", "llama.final_logit_softcapping", "llama.logit_scale"),
    *("llama.rope.freq_base_swa", "llama.rope.scaling.finetuned", "llama.rope.dimension_count"),
    *("llama.embedding_scale", "llama.residual_scale", "llama.attention.scale"),
    *("split.count", "split.no", "general.alignment", "general.name", "x" * 70, "a\0b"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.add_eos_token", "tokenizer.ggml.precompiled_charsmap"),
    *("llama.expert_used_count", "llama.expert_group_count", "llama.expert_group_used_count"),
    *("llama.expert_weights_scale", "llama.expert_gating_func", "llama.attention.q_lora_rank"),
    *("llama.attention.key_length_mla", "llama.rope.scaling.yarn_log_multiplier"),
    *("prism.hadamard.version", "prism.hadamard.block_size", "prism.hadamard.weight_names"),
    *("prism.hadamard.sign_mode", "prism.hadamard.sign_values", "prism.hadamard.tied_output"),
)
NAMES = (
    *("", "output.weight", "token_embd.weight", "rope_freqs.weight", "blk.0.attn_q.bias", "y" * 63),
    *("blk.0.ffn_up.scale", "blk.0.ffn_up.input_scale", "output.scale", "blk.9.attn_q.weight"),
    *("blk.0.ffn_up.weight\0", "\udcff.weight", "y" * 64, "token_embd.scale"),
)
