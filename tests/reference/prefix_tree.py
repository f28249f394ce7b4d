"""The prefix tree's twin: a dict from whole prefixes, as tuples of (edge key, token), to cells."""

from __future__ import annotations

from collections.abc import Hashable

Edge = tuple[Hashable, int]
"""(edge key, token)."""


class NaivePrefixTree:
    """Prefixes with a cell each; every prefix of one that is there is there."""

    def __init__(self) -> None:
        self.cells: dict[tuple[Edge, ...], int] = {}

    def match(self, edges: list[Edge]) -> int:
        """How many edges from the start are there."""
        n = 0
        while n < len(edges) and tuple(edges[: n + 1]) in self.cells:
            n += 1
        return n

    def insert(self, edges: list[Edge], start: int, cells: list[int]) -> None:
        """Edges from `start` on get these cells."""
        for i, cell in enumerate(cells, start):
            self.cells[tuple(edges[: i + 1])] = cell

    def path(self, edges: list[Edge]) -> list[int]:
        """The cells of a prefix."""
        return [self.cells[tuple(edges[: i + 1])] for i in range(len(edges))]

    def keep(self, cells: set[int]) -> None:
        """Forgets all but these cells."""
        self.cells = {edges: cell for edges, cell in self.cells.items() if cell in cells}
