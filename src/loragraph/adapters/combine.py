"""Several scaled adapters as one, by rank concatenation: exact for any ranks.

Semantics: sum_i s_i B_i A_i = [s_1 B_1 | s_2 B_2 | ...] [A_1; A_2; ...], so the ranks add up and no
cross terms come in. The scales s_i (user scale, alpha and rank) go into B; the new adapter has no
alpha. Lookups: the same with A [rank, n_vocab] and B [rank, n_embd]. Biases are summed with their
scales.

DoRA alone on a target, at user scale 1, stays what it is: its magnitude m is carried. All else of
it is m' = m / ||W + s B A||, a norm of base and adapter together, one for each adapter: several on
one target (or one at another scale, or beside a plain pair) add sum_i u_i (m'_i - 1) W x, which is
as high in rank as W, and no B A of their ranks holds it. So their sum needs the base: where it is
known, in an engine, the gains m' - 1 are summed and the rows' factors m' go into B, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import ALIGNMENT, Adapter, LoraPair, LoraTensor, allocate_block
from loragraph.adapters.base import TOKEN_EMBD, Shape
from loragraph.adapters.mix import Mix
from loragraph.adapters.report import LoadReport
from loragraph.adapters.vectors import RowVectors
from loragraph.errors import InvalidRequestError, UnsupportedError
from loragraph.ggml.handles import BF16, F16, F32

_RAW = {F32: np.uint32, F16: np.uint16, BF16: np.uint16}  # types that join value by value

Values = NDArray[np.uint32] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class _Part:
    adapter: Adapter
    scale: float  # the user's


@dataclass(frozen=True, slots=True)
class _Half:
    type: int
    ne: Shape
    data: NDArray[np.uint8]


def combine(mix: Mix) -> Adapter:
    """One adapter, in memory, that does what the mix does.

    A half keeps its type where all have the same one of F32, F16 and BF16, and B only where every
    scale is 1; else it becomes F32. InvalidRequestError for an empty mix, for adapters with unlike
    invocation tokens, and for unlike `tied_output`; UnsupportedError for DoRA that was read without
    its base and is not alone on a target, at scale 1.
    """
    parts = [_Part(adapter, scale) for adapter, scale in mix]
    _check(parts)
    targets = sorted({target for part in parts for target in part.adapter.pairs})
    halves = {
        target: (
            _joined_a(target, _having(parts, target)),
            _joined_b(target, _having(parts, target)),
        )
        for target in targets
    }
    pairs, data = _layout(halves)
    return Adapter(
        pairs,
        data,
        _report(parts, pairs, data.nbytes),
        alpha=0.0,
        invocation_tokens=parts[0].adapter.invocation_tokens,
        tied_output=any(part.adapter.tied_output for part in parts),
        vectors=_vectors(parts),
    )


def _check(parts: Sequence[_Part]) -> None:
    if not parts:
        raise InvalidRequestError("expected at least one adapter to combine", param="adapters")
    if len({part.adapter.invocation_tokens for part in parts}) > 1:
        raise InvalidRequestError(
            "expected adapters with the same invocation tokens, got unlike ones",
            param="adapters",
            hint="each becomes active at a place of its own: leave them apart",
        )
    with_table = [part for part in parts if TOKEN_EMBD in part.adapter.pairs]
    if len({part.adapter.tied_output for part in with_table}) > 1:
        raise InvalidRequestError(
            "expected adapters that agree whether the token table's pair changes a tied head",
            param="adapters",
            hint="load them with the same tied_output",
        )


def _vectors(parts: Sequence[_Part]) -> dict[str, RowVectors]:
    """Gains, shifts and norms' changes of the sum, each adapter's times its user scale; a lone DoRA
    as it is."""
    found: dict[str, RowVectors] = {}
    for target in sorted({target for part in parts for target in part.adapter.vectors}):
        having = [part for part in parts if target in part.adapter.vectors]
        weighted = [(part.scale, part.adapter.vectors[target]) for part in having]
        shift = _weighted((scale, vectors.shift) for scale, vectors in weighted)
        if _stays_dora(parts, target):
            (alone,) = _having(parts, target)
            found[target] = replace(alone.adapter.vectors[target], bias=None, shift=shift)
            continue
        if not all(vectors.ready for _, vectors in weighted):
            raise _needs_base(target)
        found[target] = RowVectors(
            gain=_weighted((scale, vectors.gain) for scale, vectors in weighted),
            shift=shift,
            delta=_weighted((scale, vectors.delta) for scale, vectors in weighted),
        )
    return found


def _stays_dora(parts: Sequence[_Part], target: str) -> bool:
    """Whether one adapter alone changes the target, at scale 1, and has a magnitude for it."""
    having = _having(parts, target)
    if len(having) != 1 or having[0].scale != 1:
        return False
    vectors = having[0].adapter.vectors.get(target)
    return vectors is not None and vectors.magnitude is not None


def _needs_base(target: str) -> UnsupportedError:
    return UnsupportedError(
        f"{target}: expected DoRA to be alone on its target, at scale 1, got more: its change is "
        "relative to the length of the base's rows, which only the base tells",
        what="combining DoRA without the base",
        hint="give the base, mix them at run time, or merge them into it",
    )


def _weighted(
    terms: Iterable[tuple[float, NDArray[np.float32] | None]],
) -> NDArray[np.float32] | None:
    """The sum of scale · values in f64, rounded once; None where no term has values."""
    present = [scale * values.astype(np.float64) for scale, values in terms if values is not None]
    return np.sum(present, axis=0).astype(np.float32) if present else None


def _having(parts: Iterable[_Part], target: str) -> list[_Part]:
    return [part for part in parts if target in part.adapter.pairs]


def _rank_axis(target: str, *, is_b: bool) -> int:
    """Where the rank stands in a half's array (n_expert, ne1, ne0)."""
    return 2 if is_b or target == TOKEN_EMBD else 1


def _joined_a(target: str, parts: Sequence[_Part]) -> _Half:
    halves = [(part.adapter, part.adapter.pairs[target].a) for part in parts]
    axis = _rank_axis(target, is_b=False)
    if _same_raw_type(tensor for _, tensor in halves):
        return _half(halves[0][1].type, [_raw(*half) for half in halves], axis)
    return _half(F32, [_f32(*half, 1.0) for half in halves], axis)


def _joined_b(target: str, parts: Sequence[_Part]) -> _Half:
    halves = [(part.adapter, part.adapter.pairs[target].b) for part in parts]
    axis = _rank_axis(target, is_b=True)
    scales = [part.adapter.effective_scale(target, part.scale) for part in parts]
    carried = _stays_dora(parts, target)
    rows = [None if carried else _row_factors(part.adapter, target) for part in parts]
    plain = all(scale == 1 for scale in scales) and all(one is None for one in rows)
    if _same_raw_type(tensor for _, tensor in halves) and plain:
        return _half(halves[0][1].type, [_raw(*half) for half in halves], axis)
    scaled = zip(halves, scales, rows, strict=True)
    return _half(F32, [_f32(*half, scale, factors) for half, scale, factors in scaled], axis)


def _row_factors(adapter: Adapter, target: str) -> NDArray[np.float32] | None:
    vectors = adapter.vectors.get(target)
    return None if vectors is None else vectors.b_rows


def _same_raw_type(tensors: Iterable[LoraTensor]) -> bool:
    types = {tensor.type for tensor in tensors}
    return len(types) == 1 and types <= _RAW.keys()


def _raw(adapter: Adapter, tensor: LoraTensor) -> Values:
    """The values as they are, (n_expert, ne1, ne0) of the type's width."""
    n0, n1, n2, _ = tensor.ne
    values: Values = adapter.raw(tensor).view(_RAW[tensor.type]).reshape(n2, n1, n0)
    return values


def _f32(
    adapter: Adapter,
    tensor: LoraTensor,
    scale: float,
    rows: NDArray[np.float32] | None = None,
) -> Values:
    """Values times the scale and their rows' factors, as the bits of f32, (n_expert, ne1, ne0)."""
    n0, n1, n2, _ = tensor.ne
    with np.errstate(over="ignore"):  # found out below
        scaled = adapter.array(tensor).reshape(n2, n1, n0) * np.float32(scale)
        if rows is not None:
            scaled *= rows[:, None]
    if not np.isfinite(scaled).all():
        raise InvalidRequestError(
            "expected scales whose products with the adapters are finite", param="adapters"
        )
    return scaled.view(np.uint32)


def _half(type_: int, parts: Sequence[Values], axis: int) -> _Half:
    joined = np.ascontiguousarray(np.concatenate(parts, axis=axis))
    n2, n1, n0 = joined.shape
    return _Half(type_, (n0, n1, n2, 1), joined.reshape(-1).view(np.uint8))


def _layout(
    halves: Mapping[str, tuple[_Half, _Half]],
) -> tuple[dict[str, LoraPair], NDArray[np.uint8]]:
    """All halves in one aligned block."""
    size = sum(
        -(-half.data.nbytes // ALIGNMENT) * ALIGNMENT for two in halves.values() for half in two
    )
    data = allocate_block(size)
    pairs: dict[str, LoraPair] = {}
    end = 0
    for target, two in halves.items():
        tensors = []
        for half in two:
            tensors.append(LoraTensor(half.type, half.ne, end, half.data.nbytes))
            data[end : end + half.data.nbytes] = half.data
            end += -(-half.data.nbytes // ALIGNMENT) * ALIGNMENT
        a, b = tensors
        pairs[target] = LoraPair(target, a, b, b.ne[0], 1.0)
    return pairs, data


def _report(parts: Sequence[_Part], pairs: Mapping[str, LoraPair], nbytes: int) -> LoadReport:
    reports = [part.adapter.report for part in parts]
    largest = max(reports, key=lambda report: report.n_targets)
    return LoadReport(
        ranks={target: pair.rank for target, pair in pairs.items()},
        scales=dict.fromkeys(pairs, 1.0),
        coverage=largest.coverage,
        n_tensors=2 * len(pairs),
        n_params=sum(math.prod(half.ne) for pair in pairs.values() for half in (pair.a, pair.b)),
        base_params=largest.base_params,
        nbytes=nbytes,
        alone=tuple(
            sorted({target for part in parts for target in part.adapter.alone} - pairs.keys())
        ),
    )
