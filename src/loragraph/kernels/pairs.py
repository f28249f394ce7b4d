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

    values: NDArray[np.uint8]  # (bytes,) u8: rank rows of n_out values an expert; Q8_0: int8 values
    scales: NDArray[np.float16] | None  # (n_expert, rank / 32, n_out) f16, Q8_0 only


def transpose_b(
    data: NDArray[Any] | bytes | memoryview,
    ggml_type: int,
    rank: int,
    n_out: int,
    n_expert: int = 1,
) -> TransposedB:
    """Transposes lora_b exactly, expert by expert: no value is rounded.

    `data` holds the bytes of a contiguous tensor [rank, n_out, n_expert] of `ggml_type`.
    ValueError if its size is another; UnsupportedError for other types.
    """
    n_rows = n_expert * n_out
    rows = raw_bytes(data, row_bytes(rank, ggml_type) * n_rows, "lora_b").reshape(n_rows, -1)
    if ggml_type != Q8_0:
        values = rows.view(f"u{_VALUE_BYTES[ggml_type]}")
        return TransposedB(_transposed(values.reshape(n_expert, n_out, rank)), None)
    blocks = rows.reshape(n_expert, n_out, rank // Q8_0_BLOCK, Q8_0_BLOCK_BYTES)
    values = _transposed(np.ascontiguousarray(blocks[..., 2:]).reshape(n_expert, n_out, rank))
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).reshape(n_expert, n_out, -1)
    return TransposedB(values, np.ascontiguousarray(scales.swapaxes(1, 2)))


@dataclass(frozen=True)
class LoraPair:
    """One adapter's two factors for one target, in the forms that the kernels read."""

    a: NDArray[Any]  # bytes of [n_in, rank(, n_expert)], C-contiguous; token table: [rank, n_vocab]
    a_type: int  # ggml number
    b: TransposedB
    b_type: int  # ggml number
    rank: int
    scale: float  # alpha / rank


# The C struct lora_pair, for whole stacks at once.
_PAIR = np.dtype(
    [
        ("a", np.uintp),
        ("bt", np.uintp),
        ("bt_scales", np.uintp),
        ("a_type", np.int32),
        ("b_type", np.int32),
        ("rank", np.int32),
        ("scale", np.float32),
    ]
)
assert _PAIR.itemsize == ffi.sizeof("lora_pair")


class TargetPairs:
    """The pairs of one target by resident slot; pairs change between steps, the address does not.

    `token_table` says that lora_a is looked up by token id: [rank, n_in] with n_in = n_vocab.
    With `n_expert` experts the kernels' slot of an expert's pair is slot * n_expert + expert.
    """

    def __init__(
        self, n_in: int, n_out: int, n_slots: int, *, token_table: bool = False, n_expert: int = 1
    ) -> None:
        self.n_in = n_in
        self.n_out = n_out
        self.n_slots = n_slots
        self.token_table = token_table
        self.n_expert = n_expert
        self._kept: list[LoraPair | None] = [None] * n_slots
        # Zeroed lazily by the system: with many experts, slots never used cost no memory.
        self._pairs = np.zeros((n_slots, n_expert), _PAIR)
        pairs = pointer(self._pairs, "lora_pair *")
        self._struct = ffi.new("lowrank_target *", (pairs, n_in, n_out))

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
        a_bytes = row_bytes(row, pair.a_type) * n_rows
        raw_bytes(pair.a, self.n_expert * a_bytes, "lora_a")
        value_bytes = 1 if pair.b_type == Q8_0 else _VALUE_BYTES[pair.b_type]
        b_bytes = pair.rank * self.n_out * value_bytes
        raw_bytes(pair.b.values, self.n_expert * b_bytes, "transposed lora_b")
        scale_bytes = 0
        if pair.b_type == Q8_0:
            scales = np.empty(0) if pair.b.scales is None else pair.b.scales
            scale_bytes = row_bytes(pair.rank, Q8_0) // Q8_0_BLOCK_BYTES * self.n_out * 2
            raw_bytes(scales, self.n_expert * scale_bytes, "scales")
        self._kept[self._checked(slot)] = pair
        expert = np.arange(self.n_expert, dtype=np.uintp)
        pairs = self._pairs[slot]
        pairs["a"] = pair.a.ctypes.data + expert * np.uintp(a_bytes)
        pairs["bt"] = pair.b.values.ctypes.data + expert * np.uintp(b_bytes)
        if pair.b.scales is None:
            pairs["bt_scales"] = 0
        else:
            pairs["bt_scales"] = pair.b.scales.ctypes.data + expert * np.uintp(scale_bytes)
        pairs["a_type"], pairs["b_type"] = pair.a_type, pair.b_type
        pairs["rank"], pairs["scale"] = pair.rank, pair.scale

    def clear(self, slot: int) -> None:
        """The adapter in `slot` does not touch this target (any more); releases its arrays."""
        if self._kept[self._checked(slot)] is not None:
            self._pairs[slot] = np.zeros((), _PAIR)
            self._kept[slot] = None

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"slot: expected [0, {self.n_slots}), got {slot}")
        return slot


def _transposed(stack: NDArray[Any]) -> NDArray[np.uint8]:
    """The last two axes exchanged, in aligned memory."""
    out = aligned_empty(stack.nbytes)
    turned = stack.swapaxes(-1, -2)
    out.view(stack.dtype).reshape(turned.shape)[:] = turned
    return out
