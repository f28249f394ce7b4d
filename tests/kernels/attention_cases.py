"""Random caches and steps for the attention tests, in the kernel's form and in the twin's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.graph.stretches import Stretches
from loragraph.kernels.attention import (
    AttendNode,
    AttentionStep,
    LayerShape,
    run_attention,
)
from loragraph.kernels.pairs import F16
from tests.kernels.cases import GUARD, GUARD_VALUE, store
from tests.reference.attention import attend

Seen = tuple[int, int, int]  # row, begin, end


@dataclass
class Stretch:
    """Cells in order, and which rows see which range of them."""

    cells: Sequence[int]
    seen: list[Seen]


@dataclass
class Layer:
    """q, K and V of a layer: what the kernel reads and what it means."""

    shape: LayerShape
    q: NDArray[np.float32]  # (n_rows, n_head, hd_k)
    k_data: NDArray[Any]  # bytes
    v_data: NDArray[Any]
    k: NDArray[np.float64] = field(repr=False)  # (n_cells, n_head_kv, hd_k)
    v: NDArray[np.float64] = field(repr=False)
    sinks: NDArray[np.float32] | None = None  # (n_head,)

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        n_rows: int,
        n_cells: int,
        heads: tuple[int, int] = (2, 1),
        n_embd: tuple[int, int] = (64, 64),
        types: tuple[int, int] = (F16, F16),
        softcap: float = 0.0,
    ) -> Layer:
        """Values of size one; scale 1 / sqrt(hd), as models have it."""
        shape = LayerShape(*heads, *n_embd, *types, float(np.float32(n_embd[0] ** -0.5)), softcap)
        q = rng.standard_normal((n_rows, heads[0], n_embd[0]), np.float32) * np.float32(2)
        k_data, k = store(
            rng.standard_normal((n_cells, heads[1] * n_embd[0]), np.float32), types[0]
        )
        v_data, v = store(
            rng.standard_normal((n_cells, heads[1] * n_embd[1]), np.float32), types[1]
        )
        k, v = k.reshape(n_cells, heads[1], -1), v.reshape(n_cells, heads[1], -1)
        return cls(shape, q, k_data, v_data, k, v)

    @property
    def n_cells(self) -> int:
        """Cells of the cache."""
        return len(self.k)

    def expected(self, stretches: Sequence[Stretch], n_rows: int) -> NDArray[np.float64]:
        """The twin's result, (n_rows, n_head * hd_v)."""
        q = self.q[:n_rows].astype(np.float64)
        visible = visible_cells(stretches, n_rows)
        sinks = None if self.sinks is None else self.sinks.astype(np.float64)
        return attend(q, self.k, self.v, visible, self.shape.scale, self.shape.softcap, sinks)


def visible_cells(stretches: Sequence[Stretch], n_rows: int) -> list[list[int]]:
    """The cells that each row sees, in the order of its path."""
    visible: list[list[int]] = [[] for _ in range(n_rows)]
    for stretch in stretches:
        for row, begin, end in stretch.seen:
            visible[row] += list(stretch.cells[begin:end])
    return visible


def to_lists(stretches: Sequence[Stretch]) -> Stretches:
    """The flat arrays of a step; neighbouring cells become one run."""
    run_ptr, starts, lengths, row_ptr, seen = [0], [], [], [0], []
    for stretch in stretches:
        cells = np.asarray(stretch.cells)
        breaks = np.flatnonzero(np.diff(cells) != 1) + 1
        for run in np.split(cells, breaks):
            starts.append(run[0])
            lengths.append(len(run))
        seen += stretch.seen
        run_ptr.append(len(starts))
        row_ptr.append(len(seen))
    row, begin, end = np.array(seen, np.int32).reshape(-1, 3).T.copy()
    firsts = np.zeros(len(stretches), np.int32)  # positions, which the kernel does not read
    runs, lengths32 = np.array(starts, np.int32), np.array(lengths, np.int32)
    pointers = np.array(run_ptr, np.int32), np.array(row_ptr, np.int32)
    return Stretches(pointers[0], runs, lengths32, firsts, pointers[1], row, begin, end)


def run_native(
    layer: Layer,
    stretches: Sequence[Stretch],
    n_rows: int,
    n_threads: int = 1,
    rows: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """The kernel's result (n_rows, n_head * hd_v); checks that nothing beside it was written.

    `rows`: row i of the step has the query of row rows[i].
    """
    shape = layer.shape
    step = AttentionStep(n_threads)
    node = AttendNode(step, shape)
    step.write(to_lists(stretches), n_rows, layer.n_cells)
    width = shape.n_head * shape.n_embd_v
    q = np.ascontiguousarray(layer.q[list(range(n_rows)) if rows is None else list(rows)])
    out = np.full((n_rows, width + GUARD), GUARD_VALUE, np.float32)
    node.bind_q(q.ctypes.data, shape.n_embd_k, shape.n_head * shape.n_embd_k)
    k, v = layer.k_data, layer.v_data
    node.bind_cells(k.ctypes.data, k.strides[0], v.ctypes.data, v.strides[0])
    node.bind_out(out.ctypes.data, width + GUARD)
    if layer.sinks is not None:
        node.bind_sinks(layer.sinks.ctypes.data)
    run_attention(node, n_threads)
    np.testing.assert_array_equal(out[:, width:], GUARD_VALUE)
    return out[:, :width].copy()


def blocks(rng: np.random.Generator, n: int, n_cells: int, size: int = 32) -> list[int]:
    """`n` cells in scattered blocks of `size`."""
    order = rng.permutation(n_cells // size)[: -(-n // size)]
    return [int(b) * size + i for b in order for i in range(size)][:n]


def own_cells(rng: np.random.Generator, lengths: Sequence[int], n_cells: int) -> list[Stretch]:
    """One decoding row per length, each with cells of its own in scattered blocks."""
    padded = [-(-n // 32) * 32 for n in lengths]
    order = blocks(rng, sum(padded), n_cells)
    starts = np.cumsum([0, *padded])
    return [Stretch(order[starts[i] : starts[i] + n], [(i, 0, n)]) for i, n in enumerate(lengths)]


def prompt_chunk(first: int, n: int, cells: Sequence[int], window: int = 0) -> list[Stretch]:
    """Rows 0 … n - 1 after `first` cells of one sequence, in two stretches; `window` 0: none."""

    def start(row: int) -> int:
        return max(0, first + row + 1 - window) if window else 0

    past = [(row, start(row), first) for row in range(n) if start(row) < first]
    own = [(row, max(0, start(row) - first), row + 1) for row in range(n)]
    earlier = [Stretch(cells[:first], past)] if past else []
    return [*earlier, Stretch(cells[first : first + n], own)]
