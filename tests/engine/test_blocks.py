"""Blocks: cells in long runs, none lost, none refused while one is free."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from loragraph.engine.blocks import Blocks, Cursor, Run, add_run, split_runs
from loragraph.errors import CapacityError


def test_a_writer_fills_neighbouring_blocks() -> None:
    """A writer alone gets one long run, however often it asks."""
    blocks, cursor = Blocks(64, 8), Cursor()
    runs: list[Run] = []
    for n in (3, 5, 1, 20):
        for start, length in blocks.take(cursor, n):
            add_run(runs, start, length)
    assert runs == [(0, 29)]


def test_writers_do_not_share_a_block() -> None:
    """Two writers take turns and still have runs of a block each."""
    blocks = Blocks(64, 8)
    cursors = [Cursor(), Cursor()]
    taken = [[blocks.take(cursor, 1)[0][0] for cursor in cursors] for _ in range(8)]
    assert [cells[0] for cells in taken] == list(range(8))
    assert [cells[1] for cells in taken] == list(range(8, 16))


def test_no_cell_is_refused_while_one_is_free() -> None:
    """Without whole blocks a writer gets what other writers leave free, to the last cell."""
    blocks = Blocks(20, 8)
    first, second = Cursor(), Cursor()
    blocks.take(first, 1)
    blocks.take(second, 1)
    third = Cursor()
    assert sum(length for _, length in blocks.take(third, 18)) == 18
    assert (blocks.n_free, blocks.n_used) == (0, 20)
    with pytest.raises(CapacityError, match="expected 1 free cells, got 0"):
        blocks.take(first, 1)
    with pytest.raises(CapacityError, match="expected 1 free cells, got 0"):
        blocks.take_holes(1)
    blocks.check()


def test_holes_leave_whole_blocks_alone() -> None:
    """Cells for a short while come out of begun blocks, those that nobody holds first."""
    blocks, cursor = Blocks(32, 8), Cursor()
    blocks.take(cursor, 3)
    whole = blocks.n_free_whole
    assert blocks.take_holes(2) == [(3, 2)]
    assert blocks.n_free_whole == whole
    assert blocks.take_holes(4) == [(5, 4)]


def test_a_writer_goes_on_behind_a_cell() -> None:
    """resume() goes on in a block that nobody holds, or in the neighbour of a full one."""
    blocks, cursor = Blocks(32, 8), Cursor()
    blocks.take(cursor, 3)
    other = Cursor()
    blocks.resume(other, 2)
    assert other.block == -1, "somebody else holds it"
    blocks.leave(cursor)
    blocks.resume(other, 2)
    assert blocks.take(other, 1) == [(3, 1)]
    assert blocks.take(other, 4) == [(4, 4)]
    blocks.leave(other)
    blocks.resume(other, 7)
    assert blocks.take(other, 2) == [(8, 2)]
    blocks.resume(other, 31)  # the last cell: nothing is behind it
    assert blocks.take(other, 1) == [(16, 1)]


def test_freed_blocks_are_whole_again() -> None:
    """A block whose cells are all free and that nobody holds counts as whole."""
    blocks, cursor = Blocks(20, 8), Cursor()
    runs = blocks.take(cursor, 20)
    blocks.free(runs[:1])
    blocks.leave(cursor)
    assert (blocks.n_free, blocks.n_free_whole, blocks.fragmentation) == (20, 20, 0.0)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free([(0, 1)])


def test_fragmentation_is_the_unused_share_of_begun_blocks() -> None:
    """Cells that are free but not in whole blocks count as fragmented."""
    blocks, cursor = Blocks(32, 8), Cursor()
    assert blocks.fragmentation == 0.0
    blocks.take(cursor, 10)
    blocks.free([(0, 6)])
    assert blocks.fragmentation == 12 / 16


def test_split_runs() -> None:
    """Runs cut at a cell, inside a run or between two."""
    runs = [(0, 3), (8, 2)]
    assert split_runs(runs, 0) == ([], runs)
    assert split_runs(runs, 2) == ([(0, 2)], [(2, 1), (8, 2)])
    assert split_runs(runs, 3) == ([(0, 3)], [(8, 2)])
    assert split_runs(runs, 5) == (runs, [])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.sampled_from([1, 4, 8]))
def test_cells_are_never_lost(data: st.DataObject, n_cells: int, block_size: int) -> None:
    """After any takes, frees, leaves and resumes each cell is free or taken once."""
    blocks = Blocks(n_cells, block_size)
    cursors = [Cursor() for _ in range(3)]
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        cursor = data.draw(st.sampled_from(cursors))
        action = data.draw(st.sampled_from(["take", "take", "holes", "free", "leave", "resume"]))
        n = data.draw(st.integers(0, blocks.n_free))
        if action in ("take", "holes"):
            runs = blocks.take(cursor, n) if action == "take" else blocks.take_holes(n)
            new = [cell for start, length in runs for cell in range(start, start + length)]
            assert len(new) == n
            taken += new
        elif action == "free" and taken:
            some = data.draw(st.sets(st.sampled_from(taken)))
            blocks.free((cell, 1) for cell in some)
            taken = [cell for cell in taken if cell not in some]
        elif action == "leave":
            blocks.leave(cursor)
        elif action == "resume" and taken:
            blocks.resume(cursor, data.draw(st.sampled_from(taken)))
        assert sorted(taken) == sorted(blocks.used_cells())
        blocks.check()
