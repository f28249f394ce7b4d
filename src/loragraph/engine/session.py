"""Saves the prefix tree's cells to a file, and loads them: what was computed is found again.

A cell is saved with all that it was computed from: the tokens before it, their salts and mix keys
(digests and scales), the model's fingerprint, the type and the layout of the cells. So a file of
another model or of other cells is refused, and cells of an adapter are found by its content alone.
To be called between two steps, by the thread that uses the scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.values import all_finite
from loragraph.engine.blocks import Cursor
from loragraph.engine.prefix_tree import Node, Part, path_of
from loragraph.engine.runner import Runner
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.session_file import Key, Session, SessionReader, open_session, write_session
from loragraph.errors import FormatError, LifecycleError
from loragraph.graph.stretches import cells_of

_PIECE_BYTES = 4 << 20

Chosen = Callable[[Node], bool]


def save_cells(
    path: str | os.PathLike[str],
    scheduler: Scheduler,
    runner: Runner,
    model: str,
    chosen: Chosen = lambda node: True,
) -> int:
    """Writes the cells of the tree's chosen nodes and of all before them; how many tokens.

    `model` is the fingerprint of the base. ConfigError where the file cannot be written.
    """
    _check_between_steps(scheduler)
    nodes = list(_ordered(scheduler.tree.root, chosen))
    keys: dict[Key, int] = {}
    number: dict[Node, int] = {}
    table = np.zeros((len(nodes), 3), np.int64)
    for i, node in enumerate(nodes):
        assert node.parent is not None
        key: Key = node.key  # type: ignore[assignment]  # a Sequence makes no other
        number[node] = i
        table[i] = number.get(node.parent, -1), keys.setdefault(key, len(keys)), len(node.tokens)
    tokens = np.array([token for node in nodes for token in node.tokens], np.int32)
    session = Session(model, runner.cell_format, tuple(keys), table, tokens)
    cells = cells_of(run for node in nodes for run in node.runs)
    write_session(path, session, _rows(runner, cells))
    return len(tokens)


def load_cells(
    path: str | os.PathLike[str], scheduler: Scheduler, runner: Runner, model: str, n_vocab: int
) -> int:
    """Takes the cells of a file into the tree, for anyone to hit and to be evicted; how many.

    Free cells are used and nothing is evicted for them: what was used last when it was saved comes
    first, what the tree has already is passed over. FormatError for a file that is cut, damaged,
    or of another model or another type or layout of cells; then nothing changed.
    """
    _check_between_steps(scheduler)
    with open_session(path) as reader:
        _check_fits(reader, path, runner, model, n_vocab)
        session = reader.session
        starts = session.starts
        parents = session.nodes[:, 0].tolist()
        inner = set(parents)
        n_loaded, ends = 0, list[Node]()
        try:
            for leaf in range(len(parents)):
                if leaf not in inner and scheduler.blocks.n_free:
                    line = _path(parents, leaf)
                    n_loaded += _load_path(reader, scheduler, runner, starts, line, ends)
        finally:
            for node in reversed(ends):  # released last: evicted last
                scheduler.tree.release(node)
        return n_loaded


def _load_path(
    reader: SessionReader,
    scheduler: Scheduler,
    runner: Runner,
    starts: NDArray[np.int64],
    line: list[int],
    ends: list[Node],
) -> int:
    """One path of the file, from the root to a leaf; as much of it as cells are free for.

    Appends where it ends to `ends`, with a reference.
    """
    session, tree, blocks = reader.session, scheduler.tree, scheduler.blocks
    tokens: list[int] = []
    parts: list[Part] = []
    indices: list[NDArray[np.int64]] = []  # of the tokens in the file
    for i in line:
        mine = np.arange(starts[i], starts[i + 1])
        parts.append((session.keys[session.nodes[i, 1]], len(tokens), len(tokens) + len(mine)))
        tokens.extend(session.tokens[mine].tolist())
        indices.append(mine)
    places = np.concatenate(indices)
    node, start = tree.advance(tree.root, tokens, parts, hit=False)
    cursor, first = Cursor(), start
    try:
        for key, part_start, part_end in parts:
            begin = max(start, part_start)
            end = min(part_end, begin + blocks.n_free)
            if end <= begin:
                continue
            width = max(1, _PIECE_BYTES // session.cells.bytes_per_cell)
            for at in range(begin, end, width):
                n = min(width, end - at)
                rows = reader.rows(int(places[at]), n)  # before the tree knows of them
                runs = blocks.take(cursor, n)
                runner.write_cells(cells_of(runs), rows)
                node = tree.insert(node, key, tokens[at : at + n], runs, computed=False)
            start = end
            if end < part_end:
                break
        return start - first
    finally:
        blocks.leave(cursor)
        ends.append(node)


def _check_fits(
    reader: SessionReader, path: str | os.PathLike[str], runner: Runner, model: str, n_vocab: int
) -> None:
    session = reader.session
    if session.model != model:
        raise FormatError(
            f"expected cells of the model {model[:12]}, got those of {session.model[:12]}",
            path=path,
            where="model",
        )
    if session.cells != runner.cell_format:
        raise FormatError(
            f"expected {runner.cell_format}, got {session.cells}",
            path=path,
            where="cells",
            hint="load it with the kv_type and attention that it was saved with",
        )
    tokens = session.tokens
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < n_vocab:
        raise FormatError(f"expected token ids below {n_vocab}", path=path, where="tokens")
    width = max(1, _PIECE_BYTES // session.cells.bytes_per_cell)
    for first in range(0, len(tokens), width):
        rows = reader.rows(first, min(width, len(tokens) - first))
        if not all_finite(session.cells.kv_type, rows.reshape(-1)):
            raise FormatError("expected finite numbers", path=path, where="rows")


def _rows(runner: Runner, cells: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    """The cells' bytes in pieces (n, bytes_per_cell)."""
    width = max(1, _PIECE_BYTES // runner.cell_format.bytes_per_cell)
    for first in range(0, len(cells), width):
        yield runner.read_cells(cells[first : first + width])


def _ordered(root: Node, chosen: Chosen) -> Iterator[Node]:
    """Chosen nodes and all before them: parents first, and what was used last before the rest."""
    wanted: set[Node] = set()
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if chosen(node):
            for one in path_of(node):
                if one in wanted:
                    break
                wanted.add(one)
    stack = _by_use(root, wanted)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(_by_use(node, wanted))


def _by_use(node: Node, wanted: set[Node]) -> list[Node]:
    """The wanted children, the one in use or used last at the end."""
    children = [child for child in node.children.values() if child in wanted]
    return sorted(children, key=lambda child: (child.ref_count > 0, child.last_used))


def _path(parents: list[int], leaf: int) -> list[int]:
    """Node numbers from the root's child to `leaf`."""
    line = [leaf]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line[::-1]


def _check_between_steps(scheduler: Scheduler) -> None:
    if scheduler.in_step:
        raise LifecycleError("cells were saved or loaded within a step")
