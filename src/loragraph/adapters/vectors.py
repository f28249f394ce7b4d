"""What an adapter does row by row beside B A x: DoRA's magnitudes, biases, changes of norms.

Semantics, with the user's scale u, W x without bias and w_s included, m' = m / ||W + s B A||:
y = W x + sum_i u_i (gain_i * W x + (b_rows_i * s_i B_i) A_i x + shift_i), where gain = m' - 1 and
b_rows = m' (DoRA), shift = s b (a bias). The lookup is the same with an embedding as its y; there
the norm is taken over the tokens (PEFT's DoraEmbeddingLayer). A bias without a pair has s = 1. Of a
norm the weight becomes w + sum_i u_i delta_i.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import AdapterMismatchError

Values = NDArray[np.float32]

_CHUNK_VALUES = 1 << 18  # of a weight at a time: 1 MB, which stays in the cache
_SINGLE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS keeps to the calling thread. Its own threads wait in a loop,
beside those of a step that computes meanwhile: seen to make a load ten times longer."""


class BaseRows(Protocol):
    """The base's weights as numbers."""

    def rows(self, name: str, first: int, last: int) -> Values:
        """Rows [first, last) of a matrix, (n, n_in) f32, the caller's; w_s is included."""


@dataclass(frozen=True, slots=True, eq=False)
class RowVectors:
    """The vectors of one target, (n_out,) f32 each; of the token table (n_embd,)."""

    magnitude: Values | None = None  # m, as in the file
    bias: Values | None = None  # b, as in the file
    gain: Values | None = None  # of W x
    b_rows: Values | None = None  # what lora_b's rows are multiplied with
    shift: Values | None = None  # added
    delta: Values | None = None  # of a norm: added to its weight

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        parts = (self.magnitude, self.bias, self.gain, self.b_rows, self.shift, self.delta)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def ready(self) -> bool:
        """Whether what the graph needs was computed: magnitudes need the base's weights."""
        return self.magnitude is None or self.gain is not None

    def add_to(self, digest: hashlib._Hash) -> None:
        """Hashes what decides the result: the file's values, not what a base made of them."""
        gain = self.magnitude if self.magnitude is not None else self.gain
        shift = self.bias if self.bias is not None else self.shift
        for tag, part in ((b"gain", gain), (b"shift", shift), (b"delta", self.delta)):
            if part is not None:
                digest.update(tag + part.tobytes())


def resolved(
    target: str,
    magnitude: Values | None,
    bias: Values | None,
    a: Values,
    b: Values,
    scale: float,
    base: BaseRows | None,
    *,
    is_table: bool,
) -> RowVectors:
    """The vectors that the graph reads; without a base those of a magnitude stay open.

    a (rank, n_in) and b (n_out, rank) f32, of the table a (n_vocab, rank) and b (n_embd, rank).
    AdapterMismatchError where a row of W + s B A is zero, or a result is not finite.
    """
    shift = None if bias is None else np.float32(scale) * bias
    if magnitude is None or base is None:
        return RowVectors(magnitude, bias, shift=shift)
    norms = row_lengths(base, target, a, b, scale, is_table=is_table)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = magnitude / norms
        gain = (ratio - 1).astype(np.float32)
    if not np.isfinite(gain).all():
        raise AdapterMismatchError(
            f"{target}: DoRA divides by the length of each row of W + s B A, and one is 0",
            tensor=target,
            hint="was it made for another base model?",
        )
    return RowVectors(magnitude, bias, gain, ratio.astype(np.float32), shift)


def row_lengths(
    base: BaseRows, target: str, a: Values, b: Values, scale: float, *, is_table: bool
) -> NDArray[np.float64]:
    """||W + s B A|| of each row, (n_out,) f64; of the table of each column, (n_embd,)."""
    if is_table:
        return _table_norms(base, target, a, b, scale)
    return _norms(base, target, a, b, scale)


def _norms(base: BaseRows, target: str, a: Values, b: Values, scale: float) -> NDArray[np.float64]:
    """||W + s B A|| of each row, (n_out,) f64."""
    n_out, n_in = len(b), a.shape[1]
    step = max(1, _CHUNK_VALUES // n_in)
    out = np.empty(n_out, np.float64)
    scaled = np.float32(scale) * b
    for first in range(0, n_out, step):
        last = min(first + step, n_out)
        rows = base.rows(target, first, last)
        _add_product(rows, scaled[first:last], a)
        # Squares in f32 round by 6e-8 each, at random; only their sum needs more.
        np.square(rows, out=rows)
        out[first:last] = np.sqrt(rows.sum(axis=1, dtype=np.float64))
    return out


def _table_norms(
    base: BaseRows, target: str, a: Values, b: Values, scale: float
) -> NDArray[np.float64]:
    """||E + s A Bᵀ|| of each column, over the tokens, (n_embd,) f64."""
    n_vocab, n_embd = len(a), len(b)
    step = max(1, _CHUNK_VALUES // n_embd)
    squares = np.zeros(n_embd, np.float64)
    scaled = np.float32(scale) * b.T
    for first in range(0, n_vocab, step):
        last = min(first + step, n_vocab)
        rows = base.rows(target, first, last)
        _add_product(rows, a[first:last], scaled)
        np.square(rows, out=rows)
        squares += rows.sum(axis=0, dtype=np.float64)
    return np.sqrt(squares)


def _add_product(out: Values, left: Values, right: Values) -> None:
    """out += left right, few rows at a time."""
    step = max(1, _SINGLE_THREAD // right.size)
    for first in range(0, len(out), step):
        out[first : first + step] += left[first : first + step] @ right
