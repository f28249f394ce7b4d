"""Stretches: what rows see, as ranges of runs of cells, against a mask written cell by cell."""

from __future__ import annotations

import numpy as np
import pytest

from loragraph.adapters.mix import EMPTY_MIX
from loragraph.graph.batch import Batch
from loragraph.graph.stretches import Stretches, mask_from

# Two sequences share positions 0-3 (cells 8-10, 2); the first goes on with cells 20, 21 (rows 0
# and 1), the second with cell 5 (row 2).
RUNS = [[(8, 3), (2, 1)], [(20, 2)], [(5, 1)]]
FIRST = [0, 4, 4]
VIEWS = [(0, 0, 2, 4, 6), (1, 0, 2, 4, 6), (0, 2, 1, 4, 5), (2, 2, 1, 4, 5)]


def cells_seen(stretches: Stretches, n_rows: int) -> list[list[int]]:
    """The cells that each row sees, in ascending order."""
    return [np.flatnonzero(row).tolist() for row in mask_from(stretches, n_rows, 32)]


def test_rows_see_shared_and_own_cells() -> None:
    """A row sees the shared stretch whole and its own up to itself."""
    stretches = Stretches.of_views(RUNS, FIRST, VIEWS)
    assert cells_seen(stretches, 3) == [[2, 8, 9, 10, 20], [2, 8, 9, 10, 20, 21], [2, 5, 8, 9, 10]]


def test_shared_stretch_stands_once() -> None:
    """A prefix that all rows share is one stretch, with all their rows, ascending."""
    stretches = Stretches.of_views(RUNS, FIRST, VIEWS)
    assert stretches.run_ptr.tolist() == [0, 2, 3, 4]
    assert stretches.row_ptr.tolist() == [0, 3, 5, 6]
    assert stretches.row.tolist() == [0, 1, 2, 0, 1, 2]
    assert stretches.row_end.tolist() == [4, 4, 4, 1, 2, 1]
    arrays = [getattr(stretches, name) for name in Stretches.__slots__]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)


def test_rows_before_a_stretch_do_not_see_it() -> None:
    """Rows of a chunk that begin before a stretch are not among its views."""
    stretches = Stretches.of_views([[(0, 2)], [(7, 2)]], [0, 2], [(0, 0, 4, 0, 4), (1, 0, 4, 0, 4)])
    assert stretches.row.tolist() == [0, 1, 2, 3, 2, 3]
    assert cells_seen(stretches, 4) == [[0], [0, 1], [0, 1, 7], [0, 1, 7, 8]]


def test_end_bounds_a_view() -> None:
    """A view's end hides the positions from there on, whatever the stretch holds."""
    stretches = Stretches.of_views([[(0, 4)], [(9, 1)]], [0, 3], [(0, 0, 1, 3, 3), (1, 0, 1, 3, 4)])
    assert cells_seen(stretches, 1) == [[0, 1, 2, 9]]


def test_single_rows_are_listed_as_chunks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode, whose views are of one row each, takes a shorter way to the same arrays."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        runs, first = [[(0, 3), (40, 5)], [(60, 2)], [(70, 1)], []], [0, 8, 10, 8]
        views = []
        for row in range(int(rng.integers(1, 6))):
            position = int(rng.integers(0, 12))
            end = position + int(rng.integers(0, 2))
            views += [(stretch, row, 1, position, end) for stretch in (0, 1, 2)[: rng.integers(4)]]
        short = Stretches.of_views(runs, first, views)
        with monkeypatch.context() as patched:
            patched.setattr("loragraph.graph.stretches._FEW_VIEWS", -1)
            general = Stretches.of_views(runs, first, views)
        for name in Stretches.__slots__:
            own, other = getattr(short, name), getattr(general, name)
            assert own.tolist() == other.tolist(), name
            assert own.dtype == other.dtype == np.int32
            assert own.flags.c_contiguous


def test_window_keeps_the_last_positions() -> None:
    """In a window of n, a row at p sees positions p - n + 1 to p, and stretches keep numbers."""
    positions = np.array([4, 5, 4], np.int32)
    windowed = Stretches.of_views(RUNS, FIRST, VIEWS).windowed(positions, 2)
    assert cells_seen(windowed, 3) == [[2, 20], [20, 21], [2, 5]]
    nothing = Stretches.of_views(RUNS, FIRST, VIEWS).windowed(positions, 1)
    assert nothing.row_ptr.tolist() == [0, 0, 2, 3]
    assert cells_seen(nothing, 3) == [[20], [21], [5]]


@pytest.mark.parametrize("n_swa", [1, 3, 7, 8, 100, 2**31 - 1])
@pytest.mark.parametrize(("first", "n_tokens"), [(0, 1), (0, 8), (5, 3), (7, 1)])
def test_a_window_over_one_stretch(first: int, n_tokens: int, n_swa: int) -> None:
    """Whether the window reaches back to the start or not, a row sees its newest positions."""
    positions = np.arange(first, first + n_tokens, dtype=np.int32)
    windowed = Stretches.of_one(first, n_tokens).windowed(positions, n_swa)
    expected = [list(range(max(0, p + 1 - n_swa), p + 1)) for p in positions.tolist()]
    assert cells_seen(windowed, n_tokens) == expected


def test_batch_of_one_is_causal() -> None:
    """A Context's batch sees the cells from 0 to its own."""
    batch = Batch.of_one(np.arange(3, dtype=np.int32), 4, EMPTY_MIX, np.array([2], np.int32))
    mask = mask_from(batch.stretches, 3, 9)
    assert (mask == (np.arange(9) <= batch.cells[:, None])).all()


def test_a_mask_reaches_to_the_highest_cell_seen() -> None:
    """end_cell counts the cells that rows read, not only those that they write."""
    assert Stretches.of_views(RUNS, FIRST, VIEWS).end_cell == 22
    assert Stretches.of_one(3, 2).end_cell == 5
