"""The prefix tree: which cells hold the K and V of which tokens, by (salt, mix, token). Pure.

A node is a run of tokens with one edge key (salt and mix key) and a cell for each. The key is part
of every edge, so a cell is found only by the mix that computed it, and nothing is ever cleared
because an adapter changed. A sequence stands at the end of a node: its path is that node and its
ancestors, and each of them counts it in `ref_count`. Nodes split when a sequence leaves them in the
middle, and join again when everyone who passes one node's end goes on into the same next one. Both
keep the identity of the lower node, so whoever stands at its end still does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from loragraph.engine.blocks import Blocks, Run, add_run, split_runs

EdgeKey = Hashable
"""(salt, mix key) of a token."""

Part = tuple[EdgeKey, int, int]
"""(edge key, start, end): tokens [start, end) of a list carry this key."""

_SLACK_BLOCKS = 8
"""An eviction that only looks for whole blocks drops at most so many blocks more than asked for."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens and the cells that hold them; the cells number as many as the tokens."""

    key: EdgeKey
    parent: Node | None
    tokens: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    children: dict[tuple[EdgeKey, int], Node] = field(default_factory=dict)
    ref_count: int = 0
    last_used: int = 0

    def append(self, tokens: Sequence[int], runs: Sequence[Run]) -> None:
        """More tokens at the end."""
        self.tokens.extend(tokens)
        for start, length in runs:
            add_run(self.runs, start, length)


@dataclass(slots=True)
class TreeStats:
    """Token counts since the start, and cell counts of now."""

    n_hit: int = 0  # tokens found in the tree instead of computed
    n_computed: int = 0  # tokens computed and inserted
    n_duplicate: int = 0  # tokens computed although the tree has them, for their logits
    n_evicted: int = 0  # tokens dropped
    n_cached: int = 0  # cells of the tree, used by a sequence or not
    n_in_use: int = 0  # of those, cells on the path of a sequence
    n_shared: int = 0  # of those, cells on the paths of several


class PrefixTree:
    """Owns the cells of `blocks` that hold computed (or this step computed) tokens."""

    def __init__(self, blocks: Blocks) -> None:
        self.root = Node(key=None, parent=None)
        self.stats = TreeStats()
        self._blocks = blocks
        self._ticks = itertools.count(1)
        self._leaves: dict[Node, int] = {}  # evictable leaves, and the tick of their heap entry
        self._heap: list[tuple[int, int, Node]] = []  # (tick, number, leaf); others are stale
        self._numbers = itertools.count()

    def advance(
        self, node: Node, tokens: Sequence[int], parts: Sequence[Part], *, hit: bool = True
    ) -> tuple[Node, int]:
        """Moves a reference from `node` along the longest match of the parts of `tokens`.

        Returns the new place and the number of tokens matched; a node that matches in part is
        split, so that the place is a node's end. Costs one comparison of list slices a node.
        """
        n_matched = 0
        for key, start, end in parts:
            while start < end:
                child = node.children.get((key, tokens[start]))
                if child is None:
                    self.stats.n_hit += n_matched if hit else 0
                    return node, n_matched
                n = _n_common(child.tokens, tokens, start, end)
                if n < len(child.tokens):
                    child = self._split(child, n)
                self._enter(child)
                self._join(child)
                node, start, n_matched = child, start + n, n_matched + n
        self.stats.n_hit += n_matched if hit else 0
        return node, n_matched

    def n_found(self, tokens: Sequence[int], parts: Sequence[Part], *, in_use: bool = False) -> int:
        """How many tokens the tree holds from the root on; changes nothing.

        With `in_use`, only up to the first node that no sequence uses.
        """
        node, n_matched = self.root, 0
        for key, start, end in parts:
            while start < end:
                child = node.children.get((key, tokens[start]))
                if child is None or (in_use and not child.ref_count):
                    return n_matched
                n = _n_common(child.tokens, tokens, start, end)
                n_matched += n
                if n < len(child.tokens):
                    return n_matched
                node, start = child, start + n
        return n_matched

    def insert(
        self,
        node: Node,
        key: EdgeKey,
        tokens: Sequence[int],
        runs: Sequence[Run],
        *,
        computed: bool = True,
    ) -> Node:
        """Adds tokens behind `node`, where the caller stands; returns its new place, their end.

        There must be no such edge yet (`has_edge`). A leaf that only the caller uses grows.
        Tokens that come from elsewhere do not count as computed.
        """
        assert not self.has_edge(node, key, tokens[0]), "this edge is there already"
        n = len(tokens)
        self.stats.n_computed += n if computed else 0
        self.stats.n_cached += n
        mine = node.ref_count == 1 and not node.children and node.key == key
        if mine and node is not self.root:
            self.stats.n_in_use += n
            node.append(tokens, runs)
            self._join(node)
            return node
        child = Node(key, node)
        child.append(tokens, runs)
        node.children[(key, tokens[0])] = child
        self._enter(child)
        self._join(child)
        return child

    def has_edge(self, node: Node, key: EdgeKey, token: int) -> bool:
        """Whether a child of `node` begins with this token."""
        return bool(node.children) and (key, token) in node.children

    def release(self, node: Node) -> None:
        """Takes the caller's reference back from `node` and its ancestors."""
        tick = next(self._ticks)
        for one in path_of(node):
            assert one.ref_count > 0, "a path was released twice"
            one.ref_count -= 1
            one.last_used = tick
            if one.ref_count == 1:
                self.stats.n_shared -= len(one.tokens)
            elif one.ref_count == 0:
                self.stats.n_in_use -= len(one.tokens)
        self._offer(node)

    def evict(self, n_cells: int) -> int:
        """Drops tokens of unused leaves, the longest unused first, from their ends.

        Stops once `n_cells` cells of whole blocks are free, or nothing can be dropped; also once
        that many cells are free anywhere and whole blocks do not come of it. Returns the number of
        tokens dropped.
        """
        dropped = 0
        at_most = n_cells + _SLACK_BLOCKS * self._blocks.block_size
        while self._blocks.n_free_whole < n_cells and self._leaves:
            if self._blocks.n_free >= n_cells and dropped >= at_most:
                break
            dropped += self._drop_tail(self._oldest_leaf())
        self.stats.n_evicted += dropped
        return dropped

    def drop(self, node: Node) -> int:
        """Drops `node` and its ancestors as far as nobody uses them or goes on from them."""
        dropped = 0
        while node in self._leaves:
            parent = node.parent
            assert parent is not None
            while node.parent is not None:
                dropped += self._drop_tail(node)
            node = parent
        self.stats.n_evicted += dropped
        return dropped

    def clear(self) -> int:
        """Drops every token that no sequence uses."""
        dropped = 0
        while self._leaves:
            dropped += self._drop_tail(self._oldest_leaf())
        self.stats.n_evicted += dropped
        return dropped

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
        leaves: set[Node] = set()
        for node in self.nodes():
            assert node.tokens, "an empty node"
            cells = [cell for start, n in node.runs for cell in range(start, start + n)]
            assert len(node.tokens) == len(cells)
            assert node.parent is not None
            assert node.parent.children[(node.key, node.tokens[0])] is node
            assert node.ref_count >= sum(child.ref_count for child in node.children.values())
            seen.extend(cells)
            if not node.ref_count and not node.children:
                leaves.add(node)
        assert len(seen) == len(set(seen)), "a cell stands in two nodes"
        assert leaves == self._leaves.keys()
        assert {(t, node) for node, t in self._leaves.items()} <= {(t, n) for t, _, n in self._heap}
        assert len(self._heap) <= 2 * len(self._leaves) + 64
        used = [(node.ref_count, len(node.tokens)) for node in self.nodes()]
        assert self.stats.n_cached == sum(n for _, n in used)
        assert self.stats.n_in_use == sum(n for refs, n in used if refs)
        assert self.stats.n_shared == sum(n for refs, n in used if refs > 1)

    def _enter(self, node: Node) -> None:
        node.ref_count += 1
        if node.ref_count == 1:
            self.stats.n_in_use += len(node.tokens)
            self._leaves.pop(node, None)
        elif node.ref_count == 2:
            self.stats.n_shared += len(node.tokens)

    def _split(self, node: Node, n: int) -> Node:
        """Cuts `node` after `n` tokens; it keeps its end, the new upper part is returned."""
        assert node.parent is not None
        first = (node.key, node.tokens[0])
        head, tail = split_runs(node.runs, n)
        upper = Node(
            node.key,
            node.parent,
            node.tokens[:n],
            head,
            ref_count=node.ref_count,
            last_used=node.last_used,
        )
        node.parent.children[first] = upper
        node.tokens, node.runs = node.tokens[n:], tail
        node.parent = upper
        upper.children[(node.key, node.tokens[0])] = node
        return upper

    def _join(self, node: Node) -> None:
        """Takes the parent into `node` where all that pass the parent's end go on to `node`."""
        parent = node.parent
        assert parent is not None
        if (
            parent.ref_count != node.ref_count
            or parent.parent is None
            or len(parent.children) > 1
            or parent.key != node.key
        ):
            return
        parent.append(node.tokens, node.runs)  # the longer list grows, so a chain costs its length
        node.tokens, node.runs = parent.tokens, parent.runs
        node.parent, parent.parent = parent.parent, None
        node.parent.children[(node.key, node.tokens[0])] = node

    def _drop_tail(self, leaf: Node) -> int:
        """Drops the tokens of a leaf's last run in its last block; the whole leaf if all are."""
        start, length = leaf.runs[-1]
        end = start + length
        begin = max(start, (end - 1) // self._blocks.block_size * self._blocks.block_size)
        n = end - begin
        self._blocks.free([(begin, n)])
        self.stats.n_cached -= n
        if n < len(leaf.tokens):
            leaf.runs.pop()
            if begin > start:
                leaf.runs.append((start, begin - start))
            del leaf.tokens[-n:]
            return n
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        del parent.children[(leaf.key, leaf.tokens[0])]
        del self._leaves[leaf]
        self._offer(parent)
        return n

    def _oldest_leaf(self) -> Node:
        while True:
            tick, _, leaf = self._heap[0]
            if self._leaves.get(leaf) == tick:
                return leaf
            heapq.heappop(self._heap)

    def _offer(self, node: Node) -> None:
        """Lets a node be evicted if it can be; drops stale entries when they are the majority."""
        if node.ref_count or node.children or node.parent is None:
            return
        self._leaves[node] = node.last_used
        heapq.heappush(self._heap, (node.last_used, next(self._numbers), node))
        if len(self._heap) > 2 * len(self._leaves) + 64:
            self._heap = [(tick, next(self._numbers), leaf) for leaf, tick in self._leaves.items()]
            heapq.heapify(self._heap)


def path_of(node: Node) -> Iterator[Node]:
    """`node` and its ancestors without the root, from the end to the start."""
    one: Node | None = node
    while one is not None and one.parent is not None:
        yield one
        one = one.parent


def _n_common(mine: list[int], tokens: Sequence[int], start: int, end: int) -> int:
    """Length of the common start of `mine` and tokens[start:end], by halves of slices."""
    limit = min(len(mine), end - start)
    if mine[:limit] == tokens[start : start + limit]:
        return limit
    low, high = 0, limit  # equal before low, unequal somewhere before high
    while high - low > 1:
        middle = (low + high) // 2
        if mine[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
