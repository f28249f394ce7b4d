"""Adapter folders and bases written for tests: safetensors by hand, GGUF bases of any family."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_bytes import Value, tensor, write_gguf

N_EMBD, N_HEAD, N_HEAD_KV, N_ROT, N_FF, N_VOCAB, N_LAYER = 32, 4, 2, 8, 48, 40, 2
N_EXPERT = 3
PEFT_CONFIG: Mapping[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
Array = NDArray[Any]

_NAMES = {np.dtype("<f8"): "F64", np.dtype("<f4"): "F32", np.dtype("<f2"): "F16"}
MODULES: Mapping[str, tuple[int, int]] = {  # (n_out, n_in)
    "self_attn.q_proj": (N_HEAD * N_ROT, N_EMBD),
    "self_attn.k_proj": (N_HEAD_KV * N_ROT, N_EMBD),
    "self_attn.v_proj": (N_HEAD_KV * N_ROT, N_EMBD),
    "self_attn.o_proj": (N_EMBD, N_HEAD * N_ROT),
    "mlp.gate_proj": (N_FF, N_EMBD),
    "mlp.up_proj": (N_FF, N_EMBD),
    "mlp.down_proj": (N_EMBD, N_FF),
}
GGUF_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def safetensors_bytes(arrays: Mapping[str, Array | tuple[str, Sequence[int], bytes]]) -> bytes:
    """A safetensors file; a tuple is (dtype, shape, bytes) as they shall stand there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in arrays.items():
        if isinstance(value, tuple):
            dtype, shape, raw = value
        else:
            dtype, shape = _NAMES[value.dtype], value.shape
            raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return raw_safetensors(json.dumps(header).encode(), data)


def raw_safetensors(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, right or wrong."""
    return struct.pack("<Q", len(header)) + header + data


def bf16(values: Array) -> tuple[str, Sequence[int], bytes]:
    """Values cut to BF16."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return "BF16", values.shape, bits.tobytes()


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    """Random values in f32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lora(
    modules: Mapping[str, tuple[int, int]],
    rank: int | Mapping[str, int] = 4,
    prefix: str = "base_model.model.",
    infix: str = "",
) -> dict[str, Array]:
    """Random lora_A and lora_B for modules of sizes (n_out, n_in)."""
    out: dict[str, Array] = {}
    for i, (module, (n_out, n_in)) in enumerate(modules.items()):
        r = rank if isinstance(rank, int) else rank.get(module, 4)
        out[f"{prefix}{module}.lora_A{infix}.weight"] = normal(2 * i, r, n_in)
        out[f"{prefix}{module}.lora_B{infix}.weight"] = normal(2 * i + 1, n_out, r)
    return out


def layers(names: Sequence[str] = tuple(MODULES), n: int = N_LAYER) -> dict[str, tuple[int, int]]:
    """Modules of every layer, by their full path."""
    return {f"model.layers.{il}.{name}": MODULES[name] for il in range(n) for name in names}


def peft(
    folder: Path,
    tensors: Mapping[str, Array | tuple[str, Sequence[int], bytes]] | None = None,
    **config: Any,
) -> Path:
    """A PEFT folder; without tensors q and v of both layers."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = lora(layers(("self_attn.q_proj", "self_attn.v_proj")))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **config}))
    return folder


def write_base(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    fused: bool = False,
    experts: bool = False,
    extra: Mapping[str, Array] | None = None,
    drop: Sequence[str] = (),
    name: str = "tiny base",
    metadata: Mapping[str, Value] | None = None,
) -> Path:
    """The header and random weights of a base of any family: enough to convert for."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        "output_norm.weight": (N_EMBD,),
    }
    if not tied:
        shapes["output.weight"] = (N_VOCAB, N_EMBD)
    for il in range(N_LAYER):
        block: dict[str, tuple[int, ...]] = {
            GGUF_NAMES[module]: shape for module, shape in MODULES.items()
        } | {"attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,)}
        if fused:
            n_qkv = sum(block.pop(part)[0] for part in ("attn_q", "attn_k", "attn_v"))
            block.pop("ffn_gate")
            block |= {"attn_qkv": (n_qkv, N_EMBD), "ffn_up": (2 * N_FF, N_EMBD)}
        if experts:
            for part in ("ffn_gate", "ffn_up", "ffn_down"):
                block[f"{part}_exps"] = (N_EXPERT, *block.pop(part))
            block["ffn_gate_inp"] = (N_EXPERT, N_EMBD)
        shapes |= {f"blk.{il}.{part}.weight": shape for part, shape in block.items()}
    arrays = {n: normal(i, *shape) for i, (n, shape) in enumerate(shapes.items())}
    arrays |= dict(extra or {})
    keys: dict[str, Value] = {
        "general.architecture": arch,
        "general.name": name,
        f"{arch}.block_count": N_LAYER,
        f"{arch}.attention.head_count": N_HEAD,
        f"{arch}.attention.head_count_kv": N_HEAD_KV,
    }
    keys |= dict(metadata or {})
    return write_gguf(path, keys, [tensor(n, a) for n, a in arrays.items() if n not in drop])
