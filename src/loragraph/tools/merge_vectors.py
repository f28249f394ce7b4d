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

_OPTIONAL: Mapping[str, frozenset[str]] = {  # biases that loragraph and llama.cpp read if present
    "llama": frozenset(
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    )
}


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
        name = target.removesuffix(".weight") + ".bias"
        if name not in tensors and target_class(target) not in _OPTIONAL.get(base.arch, ()):
            raise UnsupportedError(
                f"{target}: the adapter adds a bias, and a model of architecture '{base.arch}' has "
                f"no tensor {name} for it",
                what=f"a bias of {target}",
                hint="serve it as an adapter",
            )
        if name in tensors:
            made[name] = _summed(lib, outs[name], tensors[name], shift)
        else:
            out = OutTensor(name, (len(shift),), F32, shift.nbytes)
            source = tensors.get(target) or tensors[TOKEN_EMBD]  # to stand for one
            made[name] = Piece(out, source, made=shift.view(np.uint8))
    kept = [made.pop(piece.out.name, piece) for piece in pieces]
    return kept + list(made.values())


def _summed(lib: Library, out: OutTensor, present: TensorInfo, change: Floats) -> Piece:
    """A vector of the base with the change added, in the type that it is to have."""
    data: Bytes = np.empty(out.nbytes, np.uint8)
    values = read_f32(lib, present).reshape(1, -1).astype(np.float64) + change
    from_f32(lib, out.type, values.astype(np.float32), data)
    return Piece(out, present, made=data)
