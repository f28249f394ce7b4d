"""What a set of scaled adapters adds to each tensor of a base, as two factors a tensor.

Semantics: W' = (1 + gain) W + left @ right, left (n_expert, n_out, rank) f32 with the scales in it,
right (n_expert, rank, n_in) f32; several adapters are joined along the rank. For the token table,
whose A is indexed by token, left is A and right is B transposed. gain, which DoRA alone has, is one
value a row, of the table one a column; DoRA's factors of lora_b's rows are in left, of the table in
right. A weight with a factor of its own (w_s, in `<name>.scale`) multiplies its product only, so
left is divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import OUTPUT, TOKEN_EMBD
from loragraph.errors import InvalidRequestError, UnsupportedError
from loragraph.kernels.rewrite import RowChange

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Use:
    """An adapter with the user's scale."""

    adapter: Adapter
    scale: float


@dataclass(frozen=True, slots=True)
class Term:
    """A pair that a tensor gets: the adapter's pair for `target`, which may be another tensor's."""

    use: Use
    target: str


@dataclass(frozen=True, slots=True)
class Changes:
    """Which tensors change and by which pairs; `untie`: the head gets a tensor of its own."""

    terms: Mapping[str, Sequence[Term]]
    untie: bool
    alone: Mapping[str, Sequence[Term]]  # biases and changes of norms without a pair


def changes_of(uses: Sequence[Use], *, tied: bool) -> Changes:
    """The terms of every tensor. On a tied base table and head may come to differ.

    An adapter of the head, or one of the table that leaves the head alone, unties them; where both
    change alike they stay one tensor.
    """
    terms: dict[str, list[Term]] = {}
    alone: dict[str, list[Term]] = {}
    for use in uses:
        if use.scale == 0:
            continue
        for target in use.adapter.vectors.keys() - use.adapter.pairs.keys():
            alone.setdefault(target, []).append(Term(use, target))
        for target in use.adapter.pairs:
            terms.setdefault(target, []).append(Term(use, target))
            if tied and target == TOKEN_EMBD and use.adapter.tied_output:
                terms.setdefault(OUTPUT, []).append(Term(use, target))
    if not tied:
        return Changes(terms, untie=False, alone=alone)
    table, head = terms.get(TOKEN_EMBD, []), terms.get(OUTPUT, [])
    if table == head:
        terms.pop(OUTPUT, None)
        return Changes(terms, untie=False, alone=alone)
    return Changes(terms, untie=True, alone=alone)


def check_mergeable(uses: Sequence[Use], names: Sequence[str]) -> None:
    """Refuses adapters whose effect no fixed weight has; `names` are for the message."""
    for use, name in zip(uses, names, strict=True):
        if use.adapter.invocation_tokens:
            raise UnsupportedError(
                f"{name}: an aLoRA cannot be merged: it is active only from its invocation tokens "
                "on, a merged weight is active everywhere",
                what="merging an aLoRA",
                hint="serve it as an adapter",
            )


@dataclass(frozen=True, slots=True)
class Delta:
    """left @ right, for each expert."""

    left: Floats  # (n_expert, n_out, rank)
    right: Floats  # (n_expert, rank, n_in)
    gain: Floats | None = None  # (n_out, 1), of the token table (1, n_in)

    def change(self, expert: int) -> RowChange:
        """What is added to the rows of one expert's matrix."""
        return RowChange(self.left[expert], self.right[expert], self.gain)


def delta_of(terms: Sequence[Term], factor: Floats | None = None) -> Delta:
    """The joined factors of one tensor; `factor` is w_s, (1,) or (n_expert,).

    InvalidRequestError where a scale overflows, UnsupportedError where w_s is zero.
    """
    lefts, rights = [], []
    for term in terms:
        left, right = _factors(term)
        lefts.append(left)
        rights.append(right)
    left = lefts[0] if len(lefts) == 1 else np.concatenate(lefts, axis=2)
    if factor is not None:
        if not np.all(factor):
            raise UnsupportedError(
                f"{terms[0].target}: its factor is 0, so nothing added to it has an effect",
                what="merging into a weight with factor 0",
            )
        left = left / factor[:, None, None]
    right = rights[0] if len(rights) == 1 else np.concatenate(rights, axis=1)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise InvalidRequestError(
            f"expected a finite change of {terms[0].target}; a scale is too large", param="scale"
        )
    return Delta(np.ascontiguousarray(left), np.ascontiguousarray(right), _gain(terms))


def shift_of(terms: Sequence[Term]) -> Floats | None:
    """What the terms add to the target's product, (n_out,) f32; None where nothing."""
    return _vector_sum(terms, "shift")


def norm_change_of(terms: Sequence[Term]) -> Floats | None:
    """What the terms add to a norm's weight, (n,) f32; None where nothing."""
    return _vector_sum(terms, "delta")


def _vector_sum(terms: Sequence[Term], kind: str) -> Floats | None:
    """The sum of one kind of vector, each times its user scale, in f64 and rounded once."""
    found = [
        np.float64(term.use.scale) * values
        for term in terms
        if (vectors := term.use.adapter.vectors.get(term.target)) is not None
        and (values := getattr(vectors, kind)) is not None
    ]
    if not found:
        return None
    with np.errstate(over="ignore"):  # found out below
        total: Floats = np.sum(found, axis=0).astype(np.float32)
    if not np.isfinite(total).all():
        raise InvalidRequestError(
            f"expected a finite change of {terms[0].target}; a scale is too large", param="scale"
        )
    return total


def _gain(terms: Sequence[Term]) -> Floats | None:
    gain = _vector_sum(terms, "gain")
    if gain is None:
        return None
    return gain[None, :] if terms[0].target == TOKEN_EMBD else gain[:, None]


def _factors(term: Term) -> tuple[Floats, Floats]:
    adapter = term.use.adapter
    pair = adapter.pairs[term.target]
    scale = np.float32(adapter.effective_scale(term.target, term.use.scale))
    a, b = adapter.array(pair.a), adapter.array(pair.b)
    vectors = adapter.vectors.get(term.target)
    if vectors is not None and vectors.b_rows is not None:
        b = b * vectors.b_rows[:, None]
    if term.target == TOKEN_EMBD:
        left, right = a, b.T
    else:
        left, right = b, a
    if left.ndim == 2:
        left, right = left[None], right[None]
    with np.errstate(over="ignore", invalid="ignore"):
        return left * scale, right
