"""Vectors of adapters merged into a base: changes of norms added to the norms' weights, biases to
the base's, or a tensor of their own where the family reads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loragraph.adapters.base import TOKEN_EMBD, BaseInfo
from loragraph.adapters.report import target_class
from loragraph.errors import UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import F32
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import Bytes, from_f32
from loragraph.tools.deltas import Changes, Floats, norm_change_of, shift_of
from loragraph.tools.gguf_header import OutTensor
from loragraph.tools.merge_run import Piece
from loragraph.tools.tensor_values import read_f32

_QKV = frozenset(("attn_q", "attn_k", "attn_v", "attn_qkv"))
_FFN = frozenset(("ffn_gate", "ffn_up", "ffn_down"))
OPTIONAL: Mapping[str, frozenset[str]] = {
    "llama": _QKV | _FFN | {"attn_output"},
    "granite": _QKV | _FFN | {"attn_output"},
    "granitemoe": _QKV | {"attn_output"},
    "qwen2": _QKV | {"output"},
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3", "phi3", "qwen2moe", "qwen3", "qwen3moe", "smollm3"), _QKV
    ),
}
"""Biases that both loragraph and llama.cpp read where a file has them, by architecture."""


def with_vectors(
    lib: Library,
    tensors: Mapping[str, TensorInfo],
    base: BaseInfo,
    changes: Changes,
    pieces: Sequence[Piece],
) -> list[Piece]:
    """The pieces with changed norms and biases in them; UnsupportedError where the family has no
    place for a bias."""
    outs = {piece.out.name: piece.out for piece in pieces}
    made: dict[str, Piece] = {}
    for target in {**changes.terms, **changes.alone}:
        terms = (*changes.terms.get(target, ()), *changes.alone.get(target, ()))
        change = norm_change_of(terms)
        if change is not None:
            made[target] = _summed(lib, outs[target], tensors[target], change)
        shift = shift_of(terms)
        if shift is None:
            continue
        for name, own in _biases_of(target, shift, tensors):
            if name in tensors:
                made[name] = _summed(lib, outs[name], tensors[name], own)
                continue
            _check_optional(base, target, name)
            out = OutTensor(name, (len(own),), F32, own.nbytes)
            source = tensors.get(target) or tensors[TOKEN_EMBD]  # to stand for one
            made[name] = Piece(out, source, made=own.view(np.uint8))
    kept = [made.pop(piece.out.name, piece) for piece in pieces]
    return kept + list(made.values())


def _biases_of(
    target: str, shift: Floats, tensors: Mapping[str, TensorInfo]
) -> list[tuple[str, Floats]]:
    """The base's biases of a weight, with what each gets: of a fused one there may be three."""
    name = target.removesuffix(".weight") + ".bias"
    apart = [name.replace("attn_qkv", part) for part in ("attn_q", "attn_k", "attn_v")]
    if name in tensors or name in apart or not all(part in tensors for part in apart):
        return [(name, shift)]
    ends = np.cumsum([tensors[part].ne[0] for part in apart])
    return list(zip(apart, np.split(shift, ends[:-1]), strict=True))


def _check_optional(base: BaseInfo, target: str, name: str) -> None:
    if target_class(target) not in OPTIONAL.get(base.arch, ()):
        raise UnsupportedError(
            f"{target}: the adapter adds a bias, and a model of architecture '{base.arch}' has no "
            f"tensor {name} for it",
            what=f"a bias of {target}",
            hint="serve it as an adapter",
        )


def _summed(lib: Library, out: OutTensor, present: TensorInfo, change: Floats) -> Piece:
    """A vector of the base with the change added, in the type that it is to have."""
    data: Bytes = np.empty(out.nbytes, np.uint8)
    values = read_f32(lib, present).reshape(1, -1).astype(np.float64) + change
    from_f32(lib, out.type, values.astype(np.float32), data)
    return Piece(out, present, made=data)
