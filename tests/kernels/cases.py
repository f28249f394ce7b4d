"""Random adapters and steps for the kernel tests, in the kernel's form and in the twin's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from loragraph.kernels.lowrank import (
    ExpandNode,
    GatherNode,
    Group,
    LoraPair,
    LowrankStep,
    ShrinkNode,
    TargetPairs,
    run_nodes,
    transpose_b,
)
from tests.reference.lowrank import Pair

GUARD = 24  # floats around every row of y that no kernel may touch
GUARD_VALUE = np.float32(-12345.5)

Entry = tuple[int, int, float]  # slot, row, user scale


def store(values: NDArray[np.float32], ggml_type: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """`values` as bytes of `ggml_type`, and what those bytes mean, by the gguf package."""
    kind = GGMLQuantizationType(ggml_type)
    data = np.ascontiguousarray(quants.quantize(values, kind))
    return data, quants.dequantize(data, kind).astype(np.float64).reshape(values.shape)


def random_pair(
    rng: np.random.Generator,
    n_in: int,
    n_out: int,
    rank: int,
    types: tuple[int, int],
    *,
    token_table: bool = False,
) -> tuple[LoraPair, Pair]:
    """One adapter's pair with factors of size about 1 / sqrt(fan-in)."""
    a_shape = (n_in, rank) if token_table else (rank, n_in)
    a_data, a = store(rng.standard_normal(a_shape, np.float32) / np.float32(n_in**0.5), types[0])
    b_data, b = store(
        rng.standard_normal((n_out, rank), np.float32) / np.float32(rank**0.5), types[1]
    )
    scale = float(np.float32(rng.uniform(0.25, 4.0)))
    native = LoraPair(
        a_data, types[0], transpose_b(b_data, types[1], rank, n_out), types[1], rank, scale
    )
    return native, Pair(a.T if token_table else a, b, scale)


@dataclass
class Table:
    """A target's pairs, native and plain."""

    native: TargetPairs
    plain: list[Pair | None]

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        n_in: int,
        n_out: int,
        ranks: Sequence[int],
        types: tuple[int, int],
        *,
        token_table: bool = False,
    ) -> Table:
        """A slot per rank; rank 0: the adapter does not touch this target."""
        native = TargetPairs(n_in, n_out, len(ranks), token_table=token_table)
        plain: list[Pair | None] = []
        for slot, rank in enumerate(ranks):
            if rank == 0:
                native.clear(slot)
                plain.append(None)
                continue
            pair, twin = random_pair(rng, n_in, n_out, rank, types, token_table=token_table)
            native.set_pair(slot, pair)
            plain.append(twin)
        return cls(native, plain)


def grouped(entries: Sequence[Entry]) -> list[Group]:
    """Entries by slot, in the order of the slots' first appearance."""
    slots = dict.fromkeys(slot for slot, _, _ in entries)
    return [
        Group(
            slot,
            [row for s, row, _ in entries if s == slot],
            [scale for s, _, scale in entries if s == slot],
        )
        for slot in slots
    ]


class GuardedRows:
    """y (n_rows, n_out) f32 inside a larger array of guard values."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        n_rows, self.n_out = values.shape
        self.stride = self.n_out + GUARD
        self.memory = np.full(GUARD + n_rows * self.stride, GUARD_VALUE, np.float32)
        self.rows = self.memory[GUARD:].reshape(n_rows, self.stride)
        self.rows[:, : self.n_out] = values

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    @property
    def values(self) -> NDArray[np.float32]:
        return self.rows[:, : self.n_out]

    def guards_hold(self) -> bool:
        around = np.concatenate([self.memory[:GUARD], self.rows[:, self.n_out :].ravel()])
        return bool((around == GUARD_VALUE).all())


def run_native(
    tables: Sequence[Table],
    x: NDArray[Any],
    ys: Sequence[NDArray[np.float32]],
    entries: Sequence[Entry],
    n_threads: int = 1,
) -> list[NDArray[np.float32]]:
    """y of every table after one step; x is (n_rows, n_in) f32, or (n_rows,) i32 token ids."""
    step = LowrankStep(max(len(entries), 1), len(tables[0].plain), 0)
    step.write(grouped(entries))
    source: ShrinkNode | GatherNode
    if x.ndim == 1:
        source = GatherNode(step, tables[0].native)
        source.bind(x.ctypes.data)
    else:
        source = ShrinkNode(step, [table.native for table in tables])
        source.bind(x.ctypes.data, x.strides[0] // 4)
    step.reserve(source.floats_per_entry)
    guarded = [GuardedRows(y) for y in ys]
    expands = [ExpandNode(source, i) for i in range(len(tables))]
    for expand, rows in zip(expands, guarded, strict=True):
        expand.bind(rows.address, rows.stride)
    run_nodes([source, *expands], n_threads)
    assert all(rows.guards_hold() for rows in guarded)
    return [rows.values.copy() for rows in guarded]


def nmse(got: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Normalised mean squared error, 0 where both are equal."""
    error = float(((got.astype(np.float64) - expected) ** 2).sum())
    return error / float((expected**2).sum()) if error else 0.0
