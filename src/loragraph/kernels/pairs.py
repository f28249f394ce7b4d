"""A target's low-rank pairs in the forms that the native kernels read.

In: the bytes of lora_a and lora_b. Out: `TargetPairs`, a table by resident slot whose address a
graph keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import UnsupportedError
from loragraph.kernels.library import aligned_empty, ffi, pointer, raw_bytes

# ggml's numbers of the storage types that the kernels read.
F32, F16, Q8_0, BF16 = 0, 1, 8, 30

Q8_0_BLOCK = 32
Q8_0_BLOCK_BYTES = 34  # F16 scale, 32 int8
_VALUE_BYTES = {F32: 4, F16: 2, BF16: 2}


def row_bytes(n: int, ggml_type: int) -> int:
    """Bytes of `n` values of a row; UnsupportedError for a type the kernels do not read."""
    if ggml_type == Q8_0:
        if n % Q8_0_BLOCK:
            raise UnsupportedError(
                f"a Q8_0 row expects a multiple of {Q8_0_BLOCK} values, got {n}", what="Q8_0 row"
            )
        return n // Q8_0_BLOCK * Q8_0_BLOCK_BYTES
    if ggml_type not in _VALUE_BYTES:
        raise UnsupportedError(
            f"low-rank kernels expect F32, F16, BF16 or Q8_0 tensors, got ggml type {ggml_type}",
            what=f"ggml type {ggml_type}",
            hint="convert the adapter to F16",
        )
    return n * _VALUE_BYTES[ggml_type]


@dataclass(frozen=True)
class TransposedB:
    """lora_b with its columns made rows, since dot products of length rank do not vectorise."""

    values: NDArray[np.uint8]  # (bytes,) u8: rank rows of n_out values; Q8_0: int8 values
    scales: NDArray[np.float16] | None  # (rank / 32, n_out) f16, Q8_0 only


def transpose_b(
    data: NDArray[Any] | bytes | memoryview, ggml_type: int, rank: int, n_out: int
) -> TransposedB:
    """Transposes lora_b exactly: no value is rounded.

    `data` holds the bytes of a contiguous tensor [rank, n_out] of `ggml_type`.
    ValueError if its size is another; UnsupportedError for other types.
    """
    rows = raw_bytes(data, row_bytes(rank, ggml_type) * n_out, "lora_b").reshape(n_out, -1)
    if ggml_type != Q8_0:
        n_bytes = _VALUE_BYTES[ggml_type]
        return TransposedB(_transposed(rows.view(f"u{n_bytes}")), None)
    blocks = rows.reshape(n_out, rank // Q8_0_BLOCK, Q8_0_BLOCK_BYTES)
    values = _transposed(np.ascontiguousarray(blocks[:, :, 2:]).reshape(n_out, rank))
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).reshape(n_out, -1)
    return TransposedB(values, np.ascontiguousarray(scales.T))


@dataclass(frozen=True)
class LoraPair:
    """One adapter's two factors for one target, in the forms that the kernels read."""

    a: NDArray[Any]  # bytes of [n_in, rank] of a_type, C-contiguous; token table: [rank, n_vocab]
    a_type: int  # ggml number
    b: TransposedB
    b_type: int  # ggml number
    rank: int
    scale: float  # alpha / rank


class TargetPairs:
    """The pairs of one target by resident slot; pairs change between steps, the address does not.

    `token_table` says that lora_a is looked up by token id: [rank, n_in] with n_in = n_vocab.
    """

    def __init__(self, n_in: int, n_out: int, n_slots: int, *, token_table: bool = False) -> None:
        self.n_in = n_in
        self.n_out = n_out
        self.n_slots = n_slots
        self.token_table = token_table
        self._kept: list[LoraPair | None] = [None] * n_slots
        self._pairs = ffi.new("lora_pair[]", n_slots)
        self._struct = ffi.new("lowrank_target *", (self._pairs, n_in, n_out))

    @property
    def struct(self) -> Any:
        """`lowrank_target *`, borrowed while this object lives."""
        return self._struct

    @property
    def max_rank(self) -> int:
        """Largest rank over the slots, 0 if all are clear."""
        return max((pair.rank for pair in self._kept if pair is not None), default=0)

    def set_pair(self, slot: int, pair: LoraPair) -> None:
        """Places `pair` in `slot`, keeps its arrays alive; ValueError if a size does not fit."""
        if pair.rank < 1:
            raise ValueError(f"rank: expected at least 1, got {pair.rank}")
        row, n_rows = (pair.rank, self.n_in) if self.token_table else (self.n_in, pair.rank)
        raw_bytes(pair.a, row_bytes(row, pair.a_type) * n_rows, "lora_a")
        expected = (
            pair.rank * self.n_out * (_VALUE_BYTES[pair.b_type] if pair.b_type != Q8_0 else 1)
        )
        raw_bytes(pair.b.values, expected, "transposed lora_b")
        if pair.b_type == Q8_0:
            scales = np.empty(0) if pair.b.scales is None else pair.b.scales
            raw_bytes(
                scales, row_bytes(pair.rank, Q8_0) // Q8_0_BLOCK_BYTES * self.n_out * 2, "scales"
            )
        self._kept[self._checked(slot)] = pair
        self._pairs[slot] = (
            pointer(pair.a),
            pointer(pair.b.values),
            ffi.NULL if pair.b.scales is None else pointer(pair.b.scales),
            pair.a_type,
            pair.b_type,
            pair.rank,
            pair.scale,
        )

    def clear(self, slot: int) -> None:
        """The adapter in `slot` does not touch this target (any more); releases its arrays."""
        self._pairs[self._checked(slot)] = (ffi.NULL, ffi.NULL, ffi.NULL, 0, 0, 0, 0.0)
        self._kept[slot] = None

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"slot: expected [0, {self.n_slots}), got {slot}")
        return slot


def _transposed(matrix: NDArray[Any]) -> NDArray[np.uint8]:
    out = aligned_empty(matrix.nbytes)
    out.view(matrix.dtype).reshape(matrix.shape[::-1])[:] = matrix.T
    return out
