"""Cells handed out in blocks, so that a sequence's cells form long runs. Pure bookkeeping.

A cursor is where one writer goes on: it holds a block that nobody else begins in, and fills it in
order. Blocks are a preference, not a limit: where no whole block is left, single free cells are
handed out (shorter runs, slower attention), so a cell is never refused while one is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loragraph.errors import CapacityError

BLOCK_SIZE = 32
"""Cells a block: single scattered cells made attention five times slower than runs of 32."""

Run = tuple[int, int]
"""(first cell, length) of neighbouring cells."""

_NONE = -1


@dataclass(slots=True)
class Cursor:
    """The cell that a writer takes next if it can, and the block that it holds."""

    next: int = _NONE
    block: int = _NONE


class Blocks:
    """`n_cells` cells in blocks of `block_size`; the last block may be smaller.

    The sets of blocks are integers with a bit a block: the lowest member costs a few machine words.
    """

    def __init__(self, n_cells: int, block_size: int = BLOCK_SIZE) -> None:
        self.n_cells = n_cells
        self.block_size = block_size
        self.n_free = n_cells
        self.n_free_whole = n_cells  # cells of blocks that are all free and held by no cursor
        n_blocks = -(-n_cells // block_size)
        sizes = [min(block_size, n_cells - i * block_size) for i in range(n_blocks)]
        self._all = [(1 << size) - 1 for size in sizes]  # a bit a cell
        self._free = list(self._all)
        self._some = (1 << n_blocks) - 1  # blocks with a free cell
        self._whole = self._some  # of those, all free and not held
        self._held = 0

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return self.n_cells - self.n_free

    @property
    def fragmentation(self) -> float:
        """Share of the cells outside whole free blocks that nobody uses, from 0 to 1."""
        taken = self.n_cells - self.n_free_whole
        return 1.0 - self.n_used / taken if taken else 0.0

    def take(self, cursor: Cursor, n: int) -> list[Run]:
        """`n` cells in order, all or none: behind the cursor, then whole blocks, then holes.

        CapacityError where fewer are free.
        """
        if n > self.n_free:
            raise CapacityError(f"expected {n} free cells, got {self.n_free}")
        runs: list[Run] = []
        while n > 0:
            start, count = self._next_span(cursor, n)
            self._use(start, count)
            cursor.next = start + count
            add_run(runs, start, count)
            n -= count
        return runs

    def take_holes(self, n: int) -> list[Run]:
        """`n` cells for a short while: out of begun blocks first, so that whole ones stay whole."""
        if n > self.n_free:
            raise CapacityError(f"expected {n} free cells, got {self.n_free}")
        runs: list[Run] = []
        while n > 0:
            start, count = self._hole(n)
            self._use(start, count)
            add_run(runs, start, count)
            n -= count
        return runs

    def resume(self, cursor: Cursor, last_cell: int) -> None:
        """Lets a cursor go on behind `last_cell`, unless another one holds that block."""
        self.leave(cursor)
        block, offset = divmod(last_cell + 1, self.block_size)
        if offset == 0:
            cursor.next = last_cell + 1  # the neighbouring block, if it is whole by then
        elif not self._held >> block & 1 and self._free[block] >> offset & 1:
            cursor.next = last_cell + 1
            self._hold(cursor, block)

    def room(self, cursor: Cursor) -> int:
        """Cells right behind the cursor in the block that it holds."""
        if cursor.block == _NONE:
            return 0
        free = self._free[cursor.block] >> (cursor.next - cursor.block * self.block_size)
        return _n_trailing_ones(free)

    def leave(self, cursor: Cursor) -> None:
        """The cursor lets its block go; what it did not fill stays free."""
        block, cursor.block, cursor.next = cursor.block, _NONE, _NONE
        if block != _NONE:
            self._held &= ~(1 << block)
            self._note_whole(block)

    def free(self, runs: Iterable[Run]) -> None:
        """The cells are in use no more."""
        for start, length in runs:
            for block, offset, count in self._by_block(start, length):
                bits = ((1 << count) - 1) << offset
                assert not self._free[block] & bits, "a cell was freed twice"
                self._free[block] |= bits
                self._some |= 1 << block
                self.n_free += count
                self._note_whole(block)

    def check(self) -> None:
        """Asserts the invariants; for tests."""
        whole = [
            free == every and not self._held >> block & 1
            for block, (free, every) in enumerate(zip(self._free, self._all, strict=True))
        ]
        some = [bool(free) for free in self._free]
        assert self._whole == sum(1 << block for block, yes in enumerate(whole) if yes)
        assert self._some == sum(1 << block for block, yes in enumerate(some) if yes)
        assert self.n_free == sum(free.bit_count() for free in self._free)
        assert self.n_free_whole == sum(
            every.bit_count() for every, yes in zip(self._all, whole, strict=True) if yes
        )

    def used_cells(self) -> set[int]:
        """The cells in use; for tests."""
        return {
            cell
            for cell in range(self.n_cells)
            if not self._free[cell // self.block_size] >> (cell % self.block_size) & 1
        }

    def _next_span(self, cursor: Cursor, n: int) -> Run:
        """Free neighbouring cells for the cursor, at most `n`; holds the block they are in."""
        room = self.room(cursor)
        if room:
            return cursor.next, min(n, room)
        wanted = cursor.next
        self.leave(cursor)
        if not self._whole:
            return self._hole(n)
        block, offset = divmod(wanted, self.block_size)
        if wanted == _NONE or offset or not self._whole >> block & 1:
            block = _lowest(self._whole)
        self._hold(cursor, block)
        return block * self.block_size, min(n, self._all[block].bit_count())

    def _hole(self, n: int) -> Run:
        """Free cells of a begun block, better of one that no cursor holds, else of a whole one."""
        begun = self._some & ~self._whole
        block = _lowest(begun & ~self._held or begun or self._whole)
        offset = _lowest(self._free[block])
        count = min(n, _n_trailing_ones(self._free[block] >> offset))
        return block * self.block_size + offset, count

    def _use(self, start: int, count: int) -> None:
        block, offset = divmod(start, self.block_size)
        if self._whole >> block & 1:
            self._whole &= ~(1 << block)
            self.n_free_whole -= self._all[block].bit_count()
        self._free[block] &= ~(((1 << count) - 1) << offset)
        if not self._free[block]:
            self._some &= ~(1 << block)
        self.n_free -= count

    def _hold(self, cursor: Cursor, block: int) -> None:
        cursor.block = block
        self._held |= 1 << block
        if self._whole >> block & 1:
            self._whole &= ~(1 << block)
            self.n_free_whole -= self._all[block].bit_count()

    def _note_whole(self, block: int) -> None:
        bit = 1 << block
        free = self._free[block] == self._all[block] and not self._held & bit
        if free and not self._whole & bit:
            self._whole |= bit
            self.n_free_whole += self._all[block].bit_count()

    def _by_block(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """A run as (block, offset, count) of the blocks it lies in."""
        while length > 0:
            block, offset = divmod(start, self.block_size)
            count = min(length, self.block_size - offset)
            yield block, offset, count
            start, length = start + count, length - count


def add_run(runs: list[Run], start: int, count: int) -> None:
    """Appends cells to a list of runs, joined to the last one where they are neighbours."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((start, count))


def split_runs(runs: list[Run], n: int) -> tuple[list[Run], list[Run]]:
    """Runs of the first `n` cells, and of the others."""
    for i, (start, length) in enumerate(runs):
        if n < length:
            head = [*runs[:i], (start, n)] if n else runs[:i]
            return head, [(start + n, length - n), *runs[i + 1 :]]
        n -= length
    return list(runs), []


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _n_trailing_ones(bits: int) -> int:
    return _lowest(~bits)
