"""From the scheduler's plan to the flat arrays of one step. Pure numpy."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.mix import Mix
from loragraph.engine.plan import Chunk, StepPlan
from loragraph.engine.prefix_tree import Node, path_of
from loragraph.graph.batch import Batch
from loragraph.graph.stretches import Runs, Stretches, View, cells_of


def batch_of(plan: StepPlan) -> Batch:
    """The plan's batch. Call it before the scheduler's next `schedule`, which moves the tree on.

    Rows stand in the order of the plan's chunks, and the outputs are each chunk's last `n_outputs`
    rows, first those that give logits, then those that give states; if the whole plan has none, the
    last row's logits, for a caller who passes over them. The stretches
    are the tree's nodes on the paths of the chunks, ancestors first, and the cells that a duplicate
    chunk has to itself.
    """
    chunks = plan.chunks
    mix, mixes = _mixes(chunks)
    outputs, n_states = _outputs(chunks)
    return Batch(
        tokens=np.array(list(chain.from_iterable(chunk.tokens for chunk in chunks)), np.int32),
        positions=_ranges(chunks),
        cells=_cells(chunks),
        mix=mix,
        mixes=mixes,
        outputs=outputs,
        stretches=_stretches(chunks),
        n_states=n_states,
    )


def _cells(chunks: tuple[Chunk, ...]) -> NDArray[np.int64]:
    if all(chunk.n_tokens == 1 for chunk in chunks):  # a decode: no array for each run
        return np.array([chunk.runs[0][0] for chunk in chunks], np.int64)
    return cells_of(chain.from_iterable(chunk.runs for chunk in chunks))


def _ranges(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    positions = chain.from_iterable(range(chunk.start, chunk.end) for chunk in chunks)
    return np.fromiter(positions, np.int32)


def _outputs(chunks: tuple[Chunk, ...]) -> tuple[NDArray[np.int32], int]:
    """(n_outputs,) i32, and how many of them, the last ones, give states."""
    logits: list[int] = []
    states: list[int] = []
    row = 0
    for chunk in chunks:
        row += chunk.n_tokens
        kind = states if chunk.sequence.gives_states else logits
        kind.extend(range(row - chunk.n_outputs, row))
    rows = logits + states or [row - 1]  # a graph has at least one output row
    return np.array(rows, np.int32), len(states)


def _mixes(chunks: tuple[Chunk, ...]) -> tuple[NDArray[np.int32], tuple[Mix, ...]]:
    index: dict[Mix, int] = {}
    numbers: list[int] = []
    for chunk in chunks:
        for mix, start, end in chunk.sequence.mix_parts(chunk.start, chunk.end):
            number = index.setdefault(mix, len(index))
            numbers.extend([number] * (end - start))
    return np.array(numbers, np.int32), tuple(index)


def _stretches(chunks: tuple[Chunk, ...]) -> Stretches:
    runs: list[Runs] = []
    first: list[int] = []
    views: list[View] = []
    known: dict[Node, int] = {}
    row = 0
    for chunk in chunks:
        n, start = chunk.n_tokens, chunk.start
        visible = start if chunk.duplicate else chunk.end
        path, end = list(path_of(chunk.node)), 0
        for node in reversed(path):
            number = known.get(node)
            if number is None:
                number = known[node] = len(runs)
                runs.append(node.runs)
                first.append(end)
            if end < visible:
                views.append((number, row, n, start, visible))
            end += len(node.tokens)
        if chunk.duplicate:
            views.append((len(runs), row, n, start, chunk.end))
            runs.append(chunk.runs)
            first.append(start)
        row += n
    return Stretches.of_views(runs, first, views)
