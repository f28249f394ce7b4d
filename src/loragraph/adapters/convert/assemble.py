"""Pieces -> the arrays of one pair, f32 in the file's row order, factors folded into lora_b."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import TargetKind
from loragraph.adapters.convert.permute import reordered, row_heads
from loragraph.adapters.convert.pieces import Piece, VectorPiece
from loragraph.adapters.convert.plan import Plan, PlannedTarget
from loragraph.errors import AdapterFormatError

Values = NDArray[np.float32]


def pair_arrays(plan: Plan, target: PlannedTarget) -> tuple[Values, Values]:
    """lora_a and lora_b of a target, in the shapes that the plan states.

    Semantics: W'_rows = W_rows + sum over pieces of scale · B A, with alpha / rank taken out of B.
    """
    if target.kind is TargetKind.EMBEDDING:
        return _table(plan, target)
    n_in, n_out, n_expert = target.ne
    a = np.zeros((n_expert, target.rank, n_in), np.float32)
    b = np.zeros((n_expert, n_out, target.rank), np.float32)
    used = [0] * n_expert  # ranks taken so far; fused weights put one piece beside another
    for piece in target.pieces:
        expert = piece.place.expert or 0
        first, rows = _factors(plan, target, piece)
        columns = slice(used[expert], used[expert] + piece.rank)
        used[expert] += piece.rank
        a[expert, columns] = first
        start = piece.place.target_row
        b[expert, start : start + len(rows), columns] = rows
    return a.reshape(target.shape_a), b.reshape(target.shape_b)


def magnitude(plan: Plan, target: PlannedTarget) -> Values:
    """DoRA's magnitude of each row, (n_rows,) f32."""
    return _vector(plan, target, target.magnitude, folded=False)


def bias(plan: Plan, target: PlannedTarget) -> Values:
    """What is added beside B A x, (n_rows,) f32: read as another column of lora_b."""
    return _vector(plan, target, target.bias, folded=True)


def delta(plan: Plan, target: PlannedTarget) -> Values:
    """What is added to a norm's weight, (n,) f32."""
    return _vector(plan, target, target.delta, folded=False)


def _factors(plan: Plan, target: PlannedTarget, piece: Piece) -> tuple[Values, Values]:
    a, b = piece.factors()
    factor = plan.factor(target, piece)
    if piece.method == "lora":  # trained weights are in the file's order already
        b = reordered(np.ascontiguousarray(b), row_heads(plan.base, piece.place.part))
    return a, _scaled(target, b, factor)


def _table(plan: Plan, target: PlannedTarget) -> tuple[Values, Values]:
    """The lookup's a (n_vocab, rank) and b (n_embd, rank); pieces stand beside each other."""
    parts = []
    for piece in target.pieces:
        a, b = piece.factors()
        parts.append((a, _scaled(target, b, plan.factor(target, piece))))
    return (
        np.ascontiguousarray(np.concatenate([a for a, _ in parts], axis=1)),
        np.ascontiguousarray(np.concatenate([b for _, b in parts], axis=1)),
    )


def _vector(
    plan: Plan, target: PlannedTarget, pieces: tuple[VectorPiece, ...], *, folded: bool
) -> Values:
    out = np.zeros(target.n_rows, np.float32)
    for piece, values in _values(pieces):
        place = piece.place
        rows = reordered(values, row_heads(plan.base, place.part))
        factor = plan.factor(target, piece) if folded else 1.0
        # Two may share rows: a bias of lora_B and a trained bias of the base.
        out[place.target_row : place.target_row + len(rows)] += _scaled(target, rows, factor)
    return out


def _values(pieces: tuple[VectorPiece, ...]) -> Iterator[tuple[VectorPiece, Values]]:
    for piece in pieces:
        yield piece, piece.values()


def _scaled(target: PlannedTarget, values: Values, factor: float) -> Values:
    """values · factor, rounded once; AdapterFormatError where f32 is too narrow."""
    if factor == 1:
        return values
    with np.errstate(over="ignore"):
        scaled = (values.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise AdapterFormatError(
            f"{target.target}: values times {factor:g} leave the range of f32",
            hint="rank_pattern and alpha_pattern ask for very unlike scales",
        )
    return scaled
