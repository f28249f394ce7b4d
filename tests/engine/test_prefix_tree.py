"""The prefix tree against a dict of whole prefixes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from loragraph.engine.blocks import Blocks, Cursor
from loragraph.engine.prefix_tree import Node, Part, PrefixTree, path_of
from tests.reference.prefix_tree import Edge, NaivePrefixTree


class Walker:
    """A sequence in the tree: tokens, and where each edge key begins."""

    def __init__(self, tree: PrefixTree, blocks: Blocks) -> None:
        self.tree, self.blocks = tree, blocks
        self.node = tree.root
        self.cursor = Cursor()

    def match(self, edges: list[Edge]) -> int:
        """Walks along `edges` from where it stands."""
        tokens, parts = parts_of(edges)
        self.node, n = self.tree.advance(self.node, tokens, parts)
        return n

    def insert(self, edges: list[Edge]) -> list[int]:
        """Adds edges; their cells."""
        tokens, parts = parts_of(edges)
        cells: list[int] = []
        for key, start, end in parts:
            runs = self.blocks.take(self.cursor, end - start)
            self.node = self.tree.insert(self.node, key, tokens[start:end], runs)
            cells += [cell for first, n in runs for cell in range(first, first + n)]
        return cells

    def leave(self) -> None:
        """Ends."""
        self.blocks.leave(self.cursor)
        self.tree.release(self.node)
        self.node = self.tree.root


def parts_of(edges: list[Edge]) -> tuple[list[int], list[Part]]:
    """Tokens, and the parts of one edge key each."""
    parts: list[Part] = []
    for i, (key, _) in enumerate(edges):
        if parts and parts[-1][0] == key:
            parts[-1] = (key, parts[-1][1], i + 1)
        else:
            parts.append((key, i, i + 1))
    return [token for _, token in edges], parts


def edges_of(tokens: str, key: str = "") -> list[Edge]:
    """Letters as edges with one key."""
    return [(key, ord(letter)) for letter in tokens]


def tree_of(n_cells: int = 64, block_size: int = 4) -> tuple[PrefixTree, Blocks]:
    """An empty tree."""
    blocks = Blocks(n_cells, block_size)
    return PrefixTree(blocks), blocks


def cells_on(node: Node) -> list[int]:
    """The cells of a path from its start."""
    path = list(path_of(node))[::-1]
    return [cell for one in path for start, n in one.runs for cell in range(start, start + n)]


def test_a_partial_match_splits_the_node_under_its_users() -> None:
    """Who stands at the end of a node that is cut still has its whole path."""
    tree, blocks = tree_of()
    first, second = Walker(tree, blocks), Walker(tree, blocks)
    cells = first.insert(edges_of("abcdef"))
    assert second.match(edges_of("abcx")) == 3
    assert cells_on(first.node) == cells
    assert cells_on(second.node) == cells[:3]
    assert [node.ref_count for node in path_of(first.node)] == [1, 2]
    tree.check()


def test_users_of_one_path_keep_it_in_one_node() -> None:
    """Sequences that go on alike do not leave a chain of short nodes."""
    tree, blocks = tree_of()
    walkers = [Walker(tree, blocks) for _ in range(3)]
    walkers[0].insert(edges_of("ab"))
    assert [one.match(edges_of("ab")) for one in walkers[1:]] == [2, 2]
    for letter in "cdefgh":
        walkers[0].insert(edges_of(letter))
        assert [one.match(edges_of(letter)) for one in walkers[1:]] == [1, 1]
        tree.check()
    assert len(list(tree.nodes())) == 1
    assert {one.node for one in walkers} == {walkers[0].node}


def test_a_follower_catches_up_through_a_chain() -> None:
    """A sequence that stays behind keeps its place, and the chain joins once it has followed."""
    tree, blocks = tree_of()
    ahead, behind = Walker(tree, blocks), Walker(tree, blocks)
    ahead.insert(edges_of("ab"))
    behind.match(edges_of("ab"))
    for letter in "cde":
        ahead.insert(edges_of(letter))
    assert len(cells_on(behind.node)) == 2
    assert behind.match(edges_of("cde")) == 3
    assert behind.node is ahead.node
    assert len(list(tree.nodes())) == 1
    tree.check()


def test_keys_keep_equal_tokens_apart() -> None:
    """Tokens with another edge key are other edges, also in the middle."""
    tree, blocks = tree_of()
    one = Walker(tree, blocks)
    one.insert(edges_of("abc"))
    other = Walker(tree, blocks)
    assert other.match(edges_of("abc", "mix")) == 0
    assert other.match(edges_of("ab") + edges_of("c", "mix")) == 2
    other.insert(edges_of("c", "mix"))
    assert tree.n_found(*parts_of(edges_of("ab") + edges_of("c", "mix"))) == 3
    assert tree.n_found(*parts_of(edges_of("abx"))) == 2


def test_eviction_takes_the_longest_unused_first_and_from_the_end() -> None:
    """Used paths stay; the oldest leaf goes first, a block at a time."""
    tree, blocks = tree_of(16)
    for tokens in ("abcdefgh", "xyzw"):
        walker = Walker(tree, blocks)
        walker.insert(edges_of(tokens))
        walker.leave()
    user = Walker(tree, blocks)
    assert user.match(edges_of("ab")) == 2
    assert tree.evict(8) == 4
    assert tree.n_found(*parts_of(edges_of("abcdefgh"))) == 4
    assert tree.n_found(*parts_of(edges_of("abcd")), in_use=True) == 2
    assert tree.clear() == 6
    assert tree.n_found(*parts_of(edges_of("abcd"))) == 2
    assert tree.stats.n_evicted == 10
    tree.check()


def test_looking_for_whole_blocks_does_not_empty_the_tree() -> None:
    """Where enough cells are free, eviction gives up whole blocks after a bounded number."""
    tree, blocks = tree_of(400)
    holes: list[tuple[int, int]] = []
    for i in range(100):  # leaves of one cell in blocks that something else keeps from being whole
        walker = Walker(tree, blocks)
        walker.insert([("", i)])
        holes += blocks.take(walker.cursor, 1)
        walker.leave()
    dropped = tree.evict(4)
    assert 4 <= dropped <= 4 + 8 * 4
    assert blocks.n_free >= 4


def test_stale_heap_entries_are_dropped() -> None:
    """A prompt that comes and goes 1,000 times leaves no more entries than a bound."""
    tree, blocks = tree_of()
    for _ in range(1000):
        walker = Walker(tree, blocks)
        if not walker.match(edges_of("abc")):
            walker.insert(edges_of("abc"))
        walker.leave()
    tree.check()  # bounds the heap
    assert tree.stats.n_hit == 999 * 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_as_the_naive_twin(data: st.DataObject) -> None:
    """After any matches, inserts, releases and evictions the tree holds what the twin holds."""
    tree, blocks = tree_of(40)
    twin = NaivePrefixTree()
    walkers: list[tuple[Walker, list[Edge]]] = []
    edge = st.tuples(st.sampled_from(["", "", "m"]), st.integers(0, 1))
    for _ in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from(["come", "come", "go", "evict"]))
        if action == "come":
            edges: list[Edge] = list(data.draw(st.lists(edge, min_size=1, max_size=12)))
            walker = Walker(tree, blocks)
            assert tree.n_found(*parts_of(edges)) == twin.match(edges)
            n = walker.match(edges)
            assert n == twin.match(edges)
            rest = edges[n : n + blocks.n_free]
            twin.insert(edges, n, walker.insert(rest))
            walkers.append((walker, edges[: n + len(rest)]))
        elif action == "go" and walkers:
            walkers.pop(data.draw(st.integers(0, len(walkers) - 1)))[0].leave()
        elif action == "evict":
            tree.evict(data.draw(st.integers(1, 40)))
            twin.keep(blocks.used_cells())
        for one, path in walkers:
            assert cells_on(one.node) == twin.path(path)
        assert set(twin.cells.values()) == blocks.used_cells()
        tree.check()
        blocks.check()
