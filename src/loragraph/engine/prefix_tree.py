"""The prefix tree: which cells hold the K and V of which tokens, by (salt, mix, token). Pure.

A node is a run of tokens with one edge key (salt and mix key) and a cell for each. The key is part
of every edge, so a cell is found only by the mix that computed it, and nothing is ever cleared
because an adapter changed. A sequence stands at the end of a node: its path is that node and its
ancestors, and each of them counts it in `ref_count`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.blocks import Blocks

EdgeKey = Hashable
"""(salt, mix key) of a token."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens with their cells; `tokens` and `cells` are equally long."""

    key: EdgeKey
    parent: Node | None
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    children: dict[tuple[EdgeKey, int], Node] = field(default_factory=dict)
    ref_count: int = 0
    last_used: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)  # (first cell, length)

    def append(self, tokens: Sequence[int], cells: Sequence[int]) -> None:
        """More tokens at the end."""
        self.tokens.extend(tokens)
        self.cells.extend(cells)
        self.runs.extend(cell_runs(cells))
        self.runs = _joined(self.runs) if len(self.runs) > 1 else self.runs


@dataclass(slots=True)
class TreeStats:
    """Token counts since the start."""

    n_hit: int = 0  # found in the tree instead of computed
    n_inserted: int = 0
    n_duplicate: int = 0  # computed although the edge was there by then
    n_evicted: int = 0


class PrefixTree:
    """Owns the cells of `blocks` that hold computed (or this step computed) tokens."""

    def __init__(self, blocks: Blocks) -> None:
        self.root = Node(key=None, parent=None)
        self.stats = TreeStats()
        self._blocks = blocks
        self._ticks = itertools.count(1)
        self._evictable: list[tuple[int, int, Node]] = []  # heap of (last_used, number, leaf)
        self._numbers = itertools.count()

    def advance(
        self, node: Node, keys: Sequence[EdgeKey], tokens: Sequence[int]
    ) -> tuple[Node, int]:
        """Moves a reference from `node` along the longest match of `tokens`.

        `keys[i]` is the edge key of `tokens[i]`. Returns the new place and the tokens matched; a
        node that matches in part is split, so that the place is a node's end.
        """
        start = 0
        while start < len(tokens):
            child = node.children.get((keys[start], tokens[start]))
            if child is None:
                break
            n = _common(child, keys, tokens, start)
            if n < len(child.tokens):
                child = self._split(child, n)
            self._enter(child)
            node, start = child, start + n
        self.stats.n_hit += start
        return node, start

    def peek(self, keys: Sequence[EdgeKey], tokens: Sequence[int]) -> int:
        """How many of `tokens` the tree holds from the root; changes nothing."""
        node, start = self.root, 0
        while start < len(tokens):
            child = node.children.get((keys[start], tokens[start]))
            if child is None:
                break
            n = _common(child, keys, tokens, start)
            start += n
            if n < len(child.tokens):
                break
            node = child
        return start

    def insert(self, node: Node, key: EdgeKey, tokens: Sequence[int], cells: Sequence[int]) -> Node:
        """Adds tokens behind `node`, where the caller stands; moves it to their end.

        There must be no such edge yet (`has_edge`). A leaf that only the caller uses grows.
        """
        assert not self.has_edge(node, key, tokens[0]), "this edge is there already"
        self.stats.n_inserted += len(tokens)
        mine = node.ref_count == 1 and not node.children and node.key == key
        if mine and node is not self.root:
            node.append(tokens, cells)
            node.last_used = next(self._ticks)
            return node
        child = Node(key, node)
        child.append(tokens, cells)
        node.children[(key, tokens[0])] = child
        self._enter(child)
        return child

    def has_edge(self, node: Node, key: EdgeKey, token: int) -> bool:
        """Whether a child of `node` begins with this token."""
        return (key, token) in node.children

    def release(self, node: Node) -> None:
        """Takes the caller's reference back from `node` and its ancestors."""
        tick = next(self._ticks)
        for one in path_of(node):
            assert one.ref_count > 0, "a path was released twice"
            one.ref_count -= 1
            one.last_used = tick
        self._offer(node)

    def evict(self, n_cells: int) -> int:
        """Drops tokens of unused leaves, the longest unused first, from their ends.

        Stops once `n_cells` cells of whole blocks are free, or nothing can be dropped. Returns the
        number of tokens dropped.
        """
        dropped = 0
        while self._blocks.n_free < n_cells and self._evictable:
            tick, _, leaf = heapq.heappop(self._evictable)
            if not self._is_evictable(leaf) or leaf.last_used != tick:
                continue
            dropped += self._shorten(leaf, n_cells)
        self.stats.n_evicted += dropped
        return dropped

    def clear(self) -> int:
        """Drops every token that no sequence uses."""
        return self.evict(self._blocks.n_cells + 1)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Asserts the invariants; for tests."""
        seen: list[int] = []
        for node in self.nodes():
            assert node.tokens, "an empty node"
            assert len(node.tokens) == len(node.cells)
            assert node.runs == cell_runs(node.cells)
            assert node.parent is not None
            assert node.parent.children[(node.key, node.tokens[0])] is node
            assert node.ref_count >= sum(child.ref_count for child in node.children.values())
            seen.extend(node.cells)
        assert len(seen) == len(set(seen)), "a cell stands in two nodes"

    def _enter(self, node: Node) -> None:
        node.ref_count += 1
        node.last_used = next(self._ticks)

    def _split(self, node: Node, n: int) -> Node:
        """Cuts `node` after `n` tokens; it keeps its end, the new upper part is returned.

        Sequences stand at the ends of nodes, so those that stood here still do.
        """
        assert node.parent is not None
        upper = Node(node.key, node.parent, ref_count=node.ref_count, last_used=node.last_used)
        upper.append(node.tokens[:n], node.cells[:n])
        node.parent.children[(node.key, node.tokens[0])] = upper
        node.tokens, node.cells = node.tokens[n:], node.cells[n:]
        node.runs = cell_runs(node.cells)
        node.parent = upper
        upper.children[(node.key, node.tokens[0])] = node
        return upper

    def _shorten(self, leaf: Node, n_cells: int) -> int:
        """Drops tokens from a leaf's end, a block's worth at a time."""
        dropped = 0
        while leaf.tokens and self._blocks.n_free < n_cells:
            n = min(self._blocks.block_size, len(leaf.tokens))
            self._blocks.free(np.array(leaf.cells[-n:]))
            first = (leaf.key, leaf.tokens[0])
            del leaf.tokens[-n:], leaf.cells[-n:]
            dropped += n
        if leaf.tokens:
            leaf.runs = cell_runs(leaf.cells)
            self._offer(leaf)
        elif leaf.parent is not None:
            parent, leaf.parent = leaf.parent, None
            del parent.children[first]
            self._offer(parent)
        return dropped

    def _is_evictable(self, node: Node) -> bool:
        return node.ref_count == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._evictable, (node.last_used, next(self._numbers), node))


def path_of(node: Node) -> Iterator[Node]:
    """`node` and its ancestors without the root, from the end to the start."""
    one: Node | None = node
    while one is not None and one.parent is not None:
        yield one
        one = one.parent


def cell_runs(cells: Sequence[int]) -> list[tuple[int, int]]:
    """Cells as runs (first cell, length) of neighbours."""
    if not cells:
        return []
    array: NDArray[np.int64] = np.asarray(cells)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(array) != 1) + 1])
    lengths = np.diff(np.concatenate([starts, [len(array)]]))
    return list(zip(array[starts].tolist(), lengths.tolist(), strict=True))


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins the runs that touch at the seam of an append."""
    out = [runs[0]]
    for start, length in runs[1:]:
        last_start, last_length = out[-1]
        if last_start + last_length == start:
            out[-1] = (last_start, last_length + length)
        else:
            out.append((start, length))
    return out


def _common(node: Node, keys: Sequence[EdgeKey], tokens: Sequence[int], start: int) -> int:
    """Length of the common start of a node's run and tokens[start:]."""
    n = 0
    limit = min(len(node.tokens), len(tokens) - start)
    while n < limit and tokens[start + n] == node.tokens[n] and keys[start + n] == node.key:
        n += 1
    return n
