"""Which cells each row of a step sees, as stretches of runs instead of a mask. Pure numpy.

A stretch is a list of runs of neighbouring cells that belongs to consecutive positions of a
sequence: one node of the prefix tree, or cells of a row's own. Many rows may see one stretch, each
a half-open range of it; so a prefix that many sequences share is named, and read, once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Runs = Sequence[tuple[int, int]]
"""(first cell, length) of neighbouring cells, in the order of their positions."""

View = tuple[int, int, int, int, int]
"""(stretch, first row, n rows, position of the first row, end): these rows, at consecutive
positions, see the stretch up to and with their own position, but no position from `end` on."""


_FEW_VIEWS = 512
"""Up to so many, lists cost less than numpy's calls, each of which finds the caches emptied by the
step before."""

_ZERO = np.zeros(1, np.int32)
_FROM_0_TO_1 = np.array([0, 1], np.int32)
for _shared in (_ZERO, _FROM_0_TO_1):
    _shared.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Two CSR lists over the stretches: their runs of cells, and the rows that see them.

    Stretch s is the runs [run_ptr[s], run_ptr[s + 1]); its cells, run after run, have the offsets
    0, 1, ... and the positions first[s], first[s] + 1, ... The rows that see it are the entries
    [row_ptr[s], row_ptr[s + 1]), ascending by row: row[i] sees the offsets
    [row_begin[i], row_end[i]), never an empty range. Stretches stand before those behind them in a
    path; the ranges that a row sees in different stretches have no cell in common, and together
    they are all that it sees, itself included. All arrays are i32 and contiguous.
    """

    run_ptr: NDArray[np.int32]  # (n_stretches + 1,)
    run_start: NDArray[np.int32]  # (n_runs,) first cell
    run_length: NDArray[np.int32]  # (n_runs,) cells, at least 1
    first: NDArray[np.int32]  # (n_stretches,) position of offset 0
    row_ptr: NDArray[np.int32]  # (n_stretches + 1,)
    row: NDArray[np.int32]  # (n_views,) row of the step
    row_begin: NDArray[np.int32]  # (n_views,) first visible offset
    row_end: NDArray[np.int32]  # (n_views,) behind the last visible offset

    @property
    def n_stretches(self) -> int:
        """Stretches."""
        return len(self.first)

    @property
    def end_cell(self) -> int:
        """Behind the highest cell of any run: the cells that a mask has to have."""
        # Runs are few: lists cost less than numpy's reductions.
        return max(map(operator.add, self.run_start.tolist(), self.run_length.tolist()), default=0)

    @classmethod
    def of_views(cls, runs: Sequence[Runs], first: Sequence[int], views: list[View]) -> Stretches:
        """Stretches with these runs and first positions, seen by these views.

        Views of one stretch stand in the order of their rows.
        """
        if len(views) <= _FEW_VIEWS and all(n == 1 for _, _, n, _, _ in views):
            return cls._of_single_rows(runs, first, views)
        n_runs = [len(one) for one in runs]
        flat = np.array([run for one in runs for run in one], np.int32).reshape(-1, 2)
        starts = np.array(first, np.int32)
        run_ptr = _pointers(np.array(n_runs, np.int32))
        ends = np.concatenate([[0], np.cumsum(flat[:, 1])])
        lengths = np.diff(ends[run_ptr])
        table = np.array(views, np.int64).reshape(-1, 5)
        table = table[np.argsort(table[:, 0], kind="stable")]
        counts = table[:, 2]
        stretch, row, position, end = np.repeat(table[:, (0, 1, 3, 4)], counts, axis=0).T
        inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        seen = np.minimum(
            np.minimum(position + inside + 1, end) - starts[stretch], lengths[stretch]
        )
        keep = seen > 0
        n_views = np.bincount(stretch[keep], minlength=len(starts))
        return cls(
            run_ptr,
            np.ascontiguousarray(flat[:, 0]),
            np.ascontiguousarray(flat[:, 1]),
            starts,
            _pointers(n_views),
            (row + inside)[keep].astype(np.int32),
            np.zeros(int(keep.sum()), np.int32),
            seen[keep].astype(np.int32),
        )

    @classmethod
    def _of_single_rows(
        cls, runs: Sequence[Runs], first: Sequence[int], views: list[View]
    ) -> Stretches:
        """The same where each view is of one row, as in a decode: lists, one array for each."""
        run_ptr, lengths = [0], []
        for own in runs:
            run_ptr.append(run_ptr[-1] + len(own))
            lengths.append(sum(length for _, length in own))
        rows: list[list[int]] = [[] for _ in runs]
        ends: list[list[int]] = [[] for _ in runs]
        for stretch, row, _, position, end in views:
            seen = min(min(position + 1, end) - first[stretch], lengths[stretch])
            if seen > 0:
                rows[stretch].append(row)
                ends[stretch].append(seen)
        row_ptr = list(accumulate(map(len, rows), initial=0))
        flat = np.array([run for own in runs for run in own], np.int32).reshape(-1, 2)
        return cls(
            np.array(run_ptr, np.int32),
            flat[:, 0].copy(),
            flat[:, 1].copy(),
            np.array(first, np.int32),
            np.array(row_ptr, np.int32),
            np.array(list(chain.from_iterable(rows)), np.int32),
            np.zeros(row_ptr[-1], np.int32),
            np.array(list(chain.from_iterable(ends)), np.int32),
        )

    @classmethod
    def of_one(cls, first: int, n_tokens: int) -> Stretches:
        """One sequence that fills cells in order: one run [0, first + n_tokens)."""
        if n_tokens == 1:  # a decode, where each array made costs a microsecond or more
            end = np.array([first + 1], np.int32)
            return cls(_FROM_0_TO_1, _ZERO, end, _ZERO, _FROM_0_TO_1, _ZERO, _ZERO, end)
        rows = np.arange(n_tokens, dtype=np.int32)
        return cls(
            np.array([0, 1], np.int32),
            np.zeros(1, np.int32),
            np.array([first + n_tokens], np.int32),
            np.zeros(1, np.int32),
            np.array([0, n_tokens], np.int32),
            rows,
            np.zeros(n_tokens, np.int32),
            rows + np.int32(first + 1),
        )

    def windowed(self, positions: NDArray[np.int32], n_swa: int) -> Stretches:
        """The same for a layer with a sliding window: a row at p sees positions [p - n_swa + 1, p].

        positions (n_tokens,) i32 of the step's rows. Stretches out of everyone's window stay, with
        no row, so that both forms number them alike.
        """
        if positions.max() < n_swa:  # nobody has come so far
            return self
        if self.n_stretches == 1:  # it holds each row's own cell, so no range becomes empty
            begin = positions[self.row] + np.int32(1 - n_swa - self.first[0])
            return replace(self, row_begin=np.maximum(begin, self.row_begin))
        stretch = np.repeat(np.arange(self.n_stretches), np.diff(self.row_ptr))
        begin = positions[self.row] + 1 - n_swa - self.first[stretch]
        begin = np.maximum(begin, self.row_begin).astype(np.int32)
        keep = begin < self.row_end
        n_views = np.bincount(stretch[keep], minlength=self.n_stretches)
        return replace(
            self,
            row_ptr=_pointers(n_views),
            row=self.row[keep],
            row_begin=begin[keep],
            row_end=self.row_end[keep],
        )

    def cells(self, stretch: int) -> NDArray[np.int64]:
        """The cells of a stretch in the order of their positions, (n,) i64."""
        runs = slice(self.run_ptr[stretch], self.run_ptr[stretch + 1])
        return cells_of(zip(self.run_start[runs], self.run_length[runs], strict=True))


def mask_from(stretches: Stretches, n_tokens: int, n_kv: int) -> NDArray[np.bool_]:
    """The same as a mask: visible (n_tokens, n_kv) bool; every cell used is below n_kv."""
    visible = np.zeros((n_tokens, n_kv), bool)
    for s in range(stretches.n_stretches):
        views = slice(stretches.row_ptr[s], stretches.row_ptr[s + 1])
        rows = stretches.row[views]
        if not len(rows):
            continue
        begin, end = stretches.row_begin[views, None], stretches.row_end[views, None]
        # A slice of rows where they are neighbours, as in a chunk: far cheaper than an index.
        together = rows[-1] - rows[0] + 1 == len(rows)
        index = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
        offset = 0
        runs = slice(stretches.run_ptr[s], stretches.run_ptr[s + 1])
        starts, lengths = stretches.run_start[runs].tolist(), stretches.run_length[runs].tolist()
        for start, length in zip(starts, lengths, strict=True):
            offsets = np.arange(offset, offset + length, dtype=np.int32)
            seen = offsets < end
            if begin.any():
                seen &= offsets >= begin
            visible[index, start : start + length] = seen
            offset += length
    return visible


def cells_of(runs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """The cells of runs, run after run, (n,) i64."""
    parts = [np.arange(start, start + length) for start, length in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _pointers(counts: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """CSR pointers (n + 1,) i32 of lists with these lengths."""
    pointers = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=pointers[1:])
    return pointers
