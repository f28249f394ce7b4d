"""The cells of a seat's sequence to a file and back, and dropped: llama-server's slots in a tree.

Cells belong to no seat here. What a seat is said to hold is what the tree has of the sequence that
runs there, or of the last one that did; what is restored is found by any request, in any seat.
To be called between two steps, by the thread that uses the scheduler.
"""

from __future__ import annotations

import os

from loragraph.engine.core import EngineCore
from loragraph.engine.prefix_tree import Part, path_of
from loragraph.engine.runner import Runner
from loragraph.engine.seats import SeatTokens
from loragraph.engine.session import save_cells
from loragraph.engine.session_file import open_session
from loragraph.errors import FormatError, LifecycleError


def save_seat(
    path: str | os.PathLike[str], seat: int, core: EngineCore, runner: Runner, model: str
) -> int:
    """Writes the cells of the seat's sequence; how many tokens. ConfigError as of save_cells()."""
    held, tree = core.seats.tokens(seat), core.scheduler.tree
    node, _ = tree.advance(tree.root, held.tokens, held.parts, hit=False)
    try:
        chosen = set(path_of(node))
        return save_cells(path, core.scheduler, runner, model, chosen.__contains__)
    finally:
        tree.release(node)


def read_seat(path: str | os.PathLike[str]) -> SeatTokens:
    """What a file of save_seat() holds; FormatError for one that is damaged, or of many sequences.

    For any thread.
    """
    with open_session(path) as reader:
        session = reader.session
    if session.nodes[:, 0].tolist() != list(range(-1, len(session.nodes) - 1)):
        raise FormatError(
            "expected the cells of one sequence, got those of several", path=path, where="nodes"
        )
    starts = session.starts.tolist()
    parts: list[Part] = [
        (session.keys[key], starts[i], starts[i + 1])
        for i, key in enumerate(session.nodes[:, 1].tolist())
    ]
    return SeatTokens(session.tokens.tolist(), parts)


def erase_seat(seat: int, core: EngineCore) -> int:
    """Drops what nobody else uses of the cells of the seat's last sequence; how many tokens.

    LifecycleError while one runs there.
    """
    if core.seats.is_taken(seat):
        raise LifecycleError(
            f"a sequence runs in seat {seat}", hint="it is free once its request has ended"
        )
    held, tree = core.seats.tokens(seat), core.scheduler.tree
    node, _ = tree.advance(tree.root, held.tokens, held.parts, hit=False)
    tree.release(node)
    core.seats.put(seat, SeatTokens([], []))
    return tree.drop(node)
