"""An adapter's pairs by the weights that the graph applies them to, tied heads resolved.

A pair on the token table changes the lookup, E'[v] = E[v] + s B a_v. On a tied base it may change
the head too: logits'[v] = E'[v] x = E[v] x + s a_v (Bᵀ x), which is the ordinary form with
lora_a := Bᵀ and lora_b := A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter, LoraPair, allocate_block
from loragraph.adapters.base import OUTPUT, TOKEN_EMBD
from loragraph.ggml.handles import F32, Q8_0
from loragraph.kernels.pairs import transpose_b


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a pair: bytes of a contiguous ggml tensor [ne0, ne1(, n_expert)]."""

    data: NDArray[np.uint8]  # (nbytes,) u8
    type: int
    ne: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TargetPair:
    """a [n_in, rank] · b [rank, n_out], or for the lookup a [rank, n_vocab] · b [rank, n_embd]."""

    target: str
    a: Factor
    b: Factor
    rank: int
    scale: float  # effective scale at user scale 1

    @property
    def n_expert(self) -> int:
        """Experts stacked in both factors, 1 for a plain matrix."""
        return self.a.ne[2]


def target_pairs(adapter: Adapter, *, tied: bool) -> list[TargetPair]:
    """All pairs of an adapter, in target order; `tied` says whether the base's head is its table.

    A weight occurs once: the checks refuse a table's pair for the head beside a pair of the head.
    """
    pairs = [_plain(adapter, pair) for pair in adapter.pairs.values()]
    if tied and adapter.tied_output and TOKEN_EMBD in adapter.pairs:
        pairs.append(_head(adapter, adapter.pairs[TOKEN_EMBD]))
    return pairs


def _plain(adapter: Adapter, pair: LoraPair) -> TargetPair:
    a, b = (Factor(adapter.raw(half), half.type, half.ne[:3]) for half in (pair.a, pair.b))
    vectors = adapter.vectors.get(pair.target)
    if vectors is not None and vectors.b_rows is not None:  # DoRA: rows of B times m'
        b = _scaled_rows(adapter, pair, vectors.b_rows)
    return TargetPair(pair.target, a, b, pair.rank, pair.scale)


def _scaled_rows(adapter: Adapter, pair: LoraPair, rows: NDArray[np.float32]) -> Factor:
    """lora_b with each row times a factor, F32: another rounding to its own type would show."""
    n_out = pair.b.ne[1]
    data = allocate_block(4 * n_out * pair.rank)
    values = data[: 4 * n_out * pair.rank].view(np.float32).reshape(n_out, pair.rank)
    np.multiply(adapter.array(pair.b), rows[:, None], out=values)
    return Factor(data, F32, (pair.rank, n_out, 1))


def _head(adapter: Adapter, pair: LoraPair) -> TargetPair:
    """The table's pair as a pair of the head."""
    n_embd, n_vocab = pair.b.ne[1], pair.a.ne[1]
    b = Factor(adapter.raw(pair.a), pair.a.type, (pair.rank, n_vocab, 1))
    return TargetPair(OUTPUT, _transposed(adapter, pair, n_embd), b, pair.rank, pair.scale)


def _transposed(adapter: Adapter, pair: LoraPair, n_embd: int) -> Factor:
    """Bᵀ as [n_embd, rank], exact; Q8_0's blocks cannot turn, so those values become float32."""
    if pair.b.type == Q8_0:
        data = allocate_block(4 * n_embd * pair.rank)
        data.view(np.float32).reshape(pair.rank, n_embd)[:] = adapter.array(pair.b).T
        return Factor(data, F32, (n_embd, pair.rank, 1))
    turned = transpose_b(adapter.raw(pair.b), pair.b.type, pair.rank, n_embd)
    return Factor(turned.values, pair.b.type, (n_embd, pair.rank, 1))
