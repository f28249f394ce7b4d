"""Biases of adapters merged into a base: added to the base's bias, or a tensor of their own where
the family reads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loragraph.adapters.base import BaseInfo
from loragraph.adapters.report import target_class
from loragraph.errors import UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import F32
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import Bytes, from_f32, row_bytes
from loragraph.tools.deltas import Changes, Floats, shift_of
from loragraph.tools.gguf_header import OutTensor
from loragraph.tools.merge_run import Piece
from loragraph.tools.tensor_values import read_f32

_OPTIONAL: Mapping[str, frozenset[str]] = {  # biases that loragraph and llama.cpp read if present
    "llama": frozenset(
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    )
}


def with_biases(
    lib: Library,
    tensors: Mapping[str, TensorInfo],
    base: BaseInfo,
    changes: Changes,
    pieces: Sequence[Piece],
) -> list[Piece]:
    """The pieces with changed biases in them; UnsupportedError where the family has no place."""
    made: dict[str, Piece] = {}
    for target, terms in changes.terms.items():
        shift = shift_of(terms)
        if shift is None:
            continue
        name = target.removesuffix(".weight") + ".bias"
        if name not in tensors and target_class(target) not in _OPTIONAL.get(base.arch, ()):
            raise UnsupportedError(
                f"{target}: the adapter adds a bias, and a model of architecture '{base.arch}' has "
                f"no tensor {name} for it",
                what=f"a bias of {target}",
                hint="serve it as an adapter",
            )
        made[name] = _bias(lib, name, tensors.get(name), tensors[target], shift)
    kept = [made.pop(piece.out.name, piece) for piece in pieces]
    return kept + list(made.values())


def _bias(
    lib: Library, name: str, present: TensorInfo | None, weight: TensorInfo, shift: Floats
) -> Piece:
    """The bias in its type, or a new one; `weight` stands for the source of a new one."""
    values = shift[None, :] if present is None else read_f32(lib, present) + shift
    type_ = F32 if present is None else present.type
    data: Bytes = np.empty(row_bytes(lib, type_, len(shift)), np.uint8)
    from_f32(lib, type_, np.ascontiguousarray(values, np.float32), data)
    out = OutTensor(name, (len(shift),), type_, len(data))
    return Piece(out, present or weight, made=data)
