"""Right GGUF files, and operations that spoil them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.adapters.raw_gguf import (
    BF16,
    F16,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_VOCAB,
    Q8_0,
    Raw,
    adapter_metadata,
    gguf_bytes,
    good_tensors,
    pair,
    tensor,
)

KINDS = ("flip", "set", "u32", "u64", "cut", "insert", "delete", "repeat")

_NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 33, 64, 255, 1 << 16, 1 << 24, (1 << 31) - 1),
    *(1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63),
    (1 << 64) - 1,
)


@dataclass(frozen=True)
class Change:
    """One operation at a place in the file's header (or, with `in_data`, anywhere in the file)."""

    kind: str
    at: float  # [0, 1) of the part of the file that is changed
    value: int
    in_data: bool = False


def corpus() -> list[bytes]:
    """Adapters of all types and forms, and a base."""
    tokens: dict[str, Any] = {"adapter__alora__invocation_tokens": [3, 1, 4]}
    base = {
        "token_embd.weight": tensor(np.ones((N_VOCAB, N_EMBD))),
        "blk.0.attn_q.weight": tensor(np.ones((N_EMBD, N_EMBD)), Q8_0),
    }
    vocabulary = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ["a", "b", "<s>"] * 20,
        "tokenizer.ggml.scores": np.arange(60, dtype=np.float32),
        "llama.rope.freq_base": 10000.0,
    }
    return [
        gguf_bytes(adapter_metadata(), good_tensors()),
        gguf_bytes(adapter_metadata(**tokens), pair("blk.0.attn_q.weight", type_=F16)),
        gguf_bytes(
            adapter_metadata(loragraph__adapter__tied_output=True),
            pair("token_embd.weight", n_out=N_VOCAB, type_=BF16),
        ),
        gguf_bytes(
            adapter_metadata(adapter__lora__task_name="fuzz"),
            pair("blk.0.ffn_up_exps.weight", n_out=N_FF, rank=32, n_expert=N_EXPERT, type_=Q8_0),
        ),
        gguf_bytes(
            adapter_metadata(),
            pair("blk.0.attn_q.weight")
            | {
                "blk.0.attn_q.weight.lora_magnitude": tensor(np.ones(N_EMBD)),
                "blk.0.attn_q.weight.lora_bias": tensor(np.ones(N_EMBD)),
            },
        ),
        gguf_bytes(adapter_metadata(), _alone()),
        gguf_bytes(vocabulary, base),
    ]


def _alone() -> dict[str, Raw]:
    """Vectors without a pair."""
    return {
        "blk.0.attn_norm.weight.lora_delta": tensor(np.ones(N_EMBD)),
        "output_norm.weight.lora_delta": tensor(np.ones(N_EMBD)),
        "blk.0.ffn_up.weight.lora_bias": tensor(np.ones(N_FF)),
    }


def header_bytes(data: bytes) -> int:
    """About where the header of one of the corpus ends: behind the last tensor's name."""
    return max(data.rfind(b".weight") + 80, 200)


def mutate(data: bytes, changes: Sequence[Change]) -> bytes:
    """`data` after all changes, one after the other."""
    header = header_bytes(data)
    for change in changes:
        n = len(data) if change.in_data else min(header, len(data))
        data = _changed(data, int(change.at * n), change)
    return data


def _changed(data: bytes, at: int, change: Change) -> bytes:
    number, value = _NUMBERS[change.value % len(_NUMBERS)], change.value
    before, after = data[:at], data[at:]
    match change.kind:
        case "flip":
            new = bytes([after[0] ^ (1 << value % 8)]) + after[1:] if after else b""
        case "set":
            new = bytes([value % 256]) + after[1:]
        case "u32":
            new = (number % (1 << 32)).to_bytes(4, "little") + after[4:]
        case "u64":
            new = number.to_bytes(8, "little") + after[8:]
        case "cut":
            new = b""
        case "insert":
            new = value.to_bytes(8, "little")[: 1 + value % 8] + after
        case "delete":
            new = after[1 + value % 40 :]
        case _:
            new = after[: 1 + value % 60] + after
    return before + new


def odd_file(rng: random.Random) -> bytes:
    """A sound container whose keys, types, names, shapes and values are odd at random."""
    metadata: dict[str, Any] = adapter_metadata()
    keys = [*metadata, "adapter.alora.invocation_tokens", "loragraph.adapter.tied_output"]
    for _ in range(rng.randrange(3)):
        metadata[rng.choice([*keys, "general.alignment", "general.name"])] = rng.choice(_VALUES)
    tensors = rng.choice(_SETS)()
    for name in rng.sample(sorted(tensors), rng.randrange(len(tensors) + 1)):
        raw = tensors.pop(name)
        shift = (_rotated, _resized, _retyped, _revalued, lambda raw, _rng: raw)
        new_name = name if rng.random() < 0.8 else rng.choice(_NAMES)
        tensors[new_name] = rng.choice(shift)(raw, rng)
    return gguf_bytes(metadata, tensors)


_VALUES: tuple[Any, ...] = (
    *("adapter", "lora", "", "\0", "\udcff", 0, 1, 64, 2**32 - 1, True, False, 0.0, -1.5),
    *(float("nan"), float("inf"), np.float64(1e300), np.int32(-1), np.uint8(7), [1, 2], ["a"]),
    *(np.empty(0, np.uint32), np.array([-1], np.int32), np.array([np.nan], np.float32)),
)
_NAMES = (
    *("", ".lora_a", ".lora_b", "x.lora_a", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"),
    *("output_norm.weight.lora_a", "token_embd.weight.lora_b", "blk.0.attn_q.weight.lora_b\0"),
    *(".lora_delta", "output.weight.lora_delta", "token_embd.weight.lora_bias"),
    *("blk.\u0663.attn_q.weight.lora_a", "blk.\u00b2.\udcff.lora_b", "y" * 63, "y" * 64),
)
_SETS = (
    good_tensors,
    lambda: pair("token_embd.weight", n_out=N_VOCAB),
    lambda: pair("output.weight", n_out=N_VOCAB, rank=32, type_=Q8_0),
    lambda: pair("blk.0.ffn_up_exps.weight", n_out=N_FF, n_expert=N_EXPERT, type_=F16),
    _alone,
    lambda: good_tensors() | _alone(),
    dict,
)


def _rotated(raw: Raw, rng: random.Random) -> Raw:
    ne = list(raw.ne)
    rng.shuffle(ne)
    return Raw(tuple(ne), raw.type, raw.data)


def _resized(raw: Raw, rng: random.Random) -> Raw:
    sizes = (0, 1, 2, 31, 32, 64, 2**20, 2**31, 2**63 - 1)
    ne = tuple(rng.choice(sizes) if rng.random() < 0.3 else n for n in raw.ne)
    return Raw((*ne, *rng.choice(((), (1,), (2,), (1, 1)))), raw.type, raw.data)


def _retyped(raw: Raw, rng: random.Random) -> Raw:
    return Raw(raw.ne, rng.randrange(45), raw.data * rng.choice((1, 2)))


def _revalued(raw: Raw, rng: random.Random) -> Raw:
    byte = rng.choice((0, 0x7C, 0x7F, 0x80, 0xFF))
    return Raw(raw.ne, raw.type, bytes([byte]) * len(raw.data))
