"""Cells handed out in blocks, so that a sequence's cells form long runs. Pure bookkeeping.

A block belongs to one writer at a time (a cursor), which fills it from its start. It is free again
when none of its cells is in use and no cursor holds it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import CapacityError

BLOCK_SIZE = 32
"""Cells a block: single scattered cells made attention five times slower than runs of 32."""

_NONE = -1


@dataclass(slots=True)
class Cursor:
    """Where one writer takes its next cells: the rest of `block`, then new blocks."""

    block: int = _NONE


class Blocks:
    """`n_cells` cells in blocks of `block_size`; the last block may be smaller."""

    def __init__(self, n_cells: int, block_size: int = BLOCK_SIZE) -> None:
        self.n_cells = n_cells
        self.block_size = block_size
        n_blocks = -(-n_cells // block_size)
        self._size = np.full(n_blocks, block_size)
        self._size[-1] = n_cells - (n_blocks - 1) * block_size
        self._used = np.zeros(n_blocks, np.int64)  # cells in use
        self._filled = np.zeros(n_blocks, np.int64)  # cells handed out since it was free
        self._held = np.zeros(n_blocks, bool)  # a cursor may still fill it
        self._is_free = np.ones(n_blocks, bool)
        self._free_heap = list(range(n_blocks))  # may hold blocks taken by `_take_block(near)`
        self._n_free_cells = n_cells

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return int(self._used.sum())

    @property
    def n_free(self) -> int:
        """Cells of free blocks: what new cursors can get."""
        return self._n_free_cells

    @property
    def fragmentation(self) -> float:
        """Share of the cells outside free blocks that nobody uses, from 0 to 1."""
        taken = self.n_cells - self._n_free_cells
        return 1.0 - self.n_used / taken if taken else 0.0

    def room(self, cursor: Cursor) -> int:
        """Cells that the cursor can take without a new block."""
        if cursor.block == _NONE:
            return 0
        return int(self._size[cursor.block] - self._filled[cursor.block])

    def available(self, cursor: Cursor) -> int:
        """Cells that the cursor can take now."""
        return self.room(cursor) + self._n_free_cells

    def take(self, cursor: Cursor, n: int) -> NDArray[np.int64]:
        """`n` cells, (n,) i64, all or none; CapacityError where fewer are available."""
        if n > self.available(cursor):
            raise CapacityError(f"expected {n} free cells, got {self.available(cursor)}")
        parts = []
        while n > 0:
            if self.room(cursor) == 0:
                self._next_block(cursor)
            count = min(n, self.room(cursor))
            start = cursor.block * self.block_size + int(self._filled[cursor.block])
            parts.append(np.arange(start, start + count))
            self._filled[cursor.block] += count
            self._used[cursor.block] += count
            n -= count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def resume(self, cursor: Cursor, last_cell: int) -> None:
        """Lets a cursor without a block go on behind `last_cell`, where nobody else did."""
        block = last_cell // self.block_size
        end = block * self.block_size + int(self._filled[block])
        if cursor.block == _NONE and not self._held[block] and end == last_cell + 1:
            self._held[block] = True
            cursor.block = block

    def leave(self, cursor: Cursor) -> None:
        """The cursor takes no more cells; its unfilled rest stays with the block."""
        block, cursor.block = cursor.block, _NONE
        if block != _NONE:
            self._held[block] = False
            self._free_if_unused(block)

    def free(self, cells: NDArray[np.int64]) -> None:
        """The cells are in use no more. Those handed out last can be handed out again."""
        blocks, counts = np.unique(cells // self.block_size, return_counts=True)
        self._used[blocks] -= counts
        assert (self._used[blocks] >= 0).all(), "a cell was freed twice"
        for cell in np.sort(cells)[::-1]:
            block = int(cell) // self.block_size
            if int(cell) == block * self.block_size + self._filled[block] - 1:
                self._filled[block] -= 1
        for block in blocks:
            self._free_if_unused(int(block))

    def check(self) -> None:
        """Asserts the invariants; for tests."""
        assert (self._used <= self._filled).all()
        assert (self._filled <= self._size).all()
        assert (self._is_free == ((self._used == 0) & ~self._held)).all()
        assert self._n_free_cells == int(self._size[self._is_free].sum())

    def _next_block(self, cursor: Cursor) -> None:
        """A free block, the one behind the cursor's last if possible: runs grow longer."""
        near = cursor.block + 1
        if cursor.block != _NONE:
            self._held[cursor.block] = False
            self._free_if_unused(cursor.block)
        inside = cursor.block != _NONE and near < len(self._is_free)
        block = near if inside and self._is_free[near] else self._lowest_free()
        self._is_free[block] = False
        self._held[block] = True
        self._filled[block] = 0
        self._n_free_cells -= int(self._size[block])
        cursor.block = block

    def _lowest_free(self) -> int:
        while True:
            block = heapq.heappop(self._free_heap)
            if self._is_free[block]:
                return block

    def _free_if_unused(self, block: int) -> None:
        if self._used[block] == 0 and not self._held[block] and not self._is_free[block]:
            self._is_free[block] = True
            self._filled[block] = 0
            self._n_free_cells += int(self._size[block])
            heapq.heappush(self._free_heap, block)
