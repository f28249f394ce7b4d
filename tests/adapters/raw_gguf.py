"""GGUF adapter files written byte by byte, right or wrong as told, for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from loragraph.adapters.base import BaseInfo, base_info

F32 = GGMLQuantizationType.F32
F16 = GGMLQuantizationType.F16
BF16 = GGMLQuantizationType.BF16
Q8_0 = GGMLQuantizationType.Q8_0

N_EMBD, N_FF, N_VOCAB, N_EXPERT = 64, 96, 128, 3

_FORMATS: dict[type, tuple[int, str]] = {
    np.uint8: (0, "B"),
    np.int32: (5, "i"),
    np.uint32: (4, "I"),
    np.float32: (6, "f"),
    np.float64: (12, "d"),
    bool: (7, "?"),
    int: (4, "I"),
    float: (6, "f"),
}


@dataclass(frozen=True)
class Raw:
    """A tensor as it shall stand in the file: ggml order, any type number, any bytes."""

    ne: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None  # overrides the place in the data section


def tensor(values: Any, type_: GGMLQuantizationType = F32) -> Raw:
    """A well-formed tensor of numpy-order values."""
    array = np.asarray(values, np.float32)
    data = np.ascontiguousarray(quantize(array, type_)).tobytes()
    return Raw(tuple(reversed(array.shape)), int(type_), data)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Raw] | list[tuple[str, Raw]]
) -> bytes:
    """One GGUF v3 file; python ints are u32, floats f32, lists arrays of strings or u32."""
    items = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    head = b"GGUF" + struct.pack("<IQQ", 3, len(items), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, raw in items:
        head += _text(name) + struct.pack(f"<I{len(raw.ne)}Q", len(raw.ne), *raw.ne)
        head += struct.pack("<IQ", raw.type, len(data) if raw.offset is None else raw.offset)
        data += _padded(raw.data)
    return _padded(head) + data


def adapter_metadata(**overrides: Any) -> dict[str, Any]:
    """Metadata of a right adapter; None removes a key, `__` in a name stands for a dot."""
    metadata = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
    }
    metadata |= {key.replace("__", "."): value for key, value in overrides.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def pair(
    target: str,
    n_in: int = N_EMBD,
    n_out: int = N_EMBD,
    rank: int = 4,
    *,
    type_: GGMLQuantizationType = F32,
    n_expert: int = 0,
    seed: int = 0,
) -> dict[str, Raw]:
    """Both halves of a random pair, by tensor name; the token table by its name."""
    rng = np.random.default_rng(seed)
    stack = (n_expert,) if n_expert else ()
    if target == "token_embd.weight":
        a, b = rng.standard_normal((n_out, rank)), rng.standard_normal((n_in, rank))
    else:
        a, b = rng.standard_normal((*stack, rank, n_in)), rng.standard_normal((*stack, n_out, rank))
    return {f"{target}.lora_a": tensor(a, type_), f"{target}.lora_b": tensor(b, type_)}


def good_tensors() -> dict[str, Raw]:
    """Tensors of a right adapter for base()."""
    return pair("blk.0.attn_q.weight") | pair("blk.0.ffn_up.weight", n_out=N_FF, rank=8, seed=1)


def write(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Raw] | list[tuple[str, Raw]] | None = None,
) -> Path:
    """Writes a file; a right adapter by default."""
    path.write_bytes(
        gguf_bytes(
            adapter_metadata() if metadata is None else metadata,
            good_tensors() if tensors is None else tensors,
        )
    )
    return path


def base(*, tied: bool = False) -> BaseInfo:
    """A base of one layer, with experts."""
    shapes = {
        "token_embd.weight": (N_EMBD, N_VOCAB, 1, 1),
        "output_norm.weight": (N_EMBD, 1, 1, 1),
        "blk.0.attn_norm.weight": (N_EMBD, 1, 1, 1),
        "blk.0.attn_q.weight": (N_EMBD, N_EMBD, 1, 1),
        "blk.0.attn_q.bias": (N_EMBD, 1, 1, 1),
        "blk.0.ffn_up.weight": (N_EMBD, N_FF, 1, 1),
        "blk.0.ffn_up_exps.weight": (N_EMBD, N_FF, N_EXPERT, 1),
        "rope_freqs.weight": (8, 1, 1, 1),
    }
    if not tied:
        shapes["output.weight"] = (N_EMBD, N_VOCAB, 1, 1)
    return base_info("llama", "tiny", shapes)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        if isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        return _array(np.asarray(value, np.uint32))
    if isinstance(value, np.ndarray):
        return _array(value)
    kind, letter = _FORMATS[type(value)]
    return struct.pack(f"<I{letter}", kind, value)


def _array(values: Any) -> bytes:
    head = struct.pack("<IIQ", 9, _FORMATS[values.dtype.type][0], values.size)
    return head + bytes(values.tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)
