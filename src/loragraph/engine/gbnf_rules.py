"""The rules of a grammar, and the search for left recursion that libllama gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from loragraph.errors import InvalidRequestError

MAX_LEFT_DEPTH = 4096
MAX_LEFT_PATHS = 1 << 20


class Kind(IntEnum):
    """Kinds of grammar elements, named as in llama-grammar.h."""

    END = 0
    ALT = 1
    RULE_REF = 2
    CHAR = 3
    CHAR_NOT = 4
    CHAR_RNG_UPPER = 5
    CHAR_ALT = 6
    CHAR_ANY = 7


Element = tuple[Kind, int]


@dataclass(frozen=True)
class Grammar:
    """Rules by id, each a list of elements that ends in END; `root` is the start rule's id."""

    rules: list[list[Element]]
    names: list[str]
    root: int

    def alternatives(self, rule: int) -> Iterator[list[Element]]:
        """The sequences between a rule's ALTs."""
        sequence: list[Element] = []
        for element in self.rules[rule]:
            if element[0] in (Kind.ALT, Kind.END):
                yield sequence
                sequence = []
            else:
                sequence.append(element)


def _nullable(grammar: Grammar) -> list[bool]:
    """Per rule: does it produce the empty text? Each alternative counts what it waits for."""
    nullable = [False] * len(grammar.rules)
    waiting: dict[int, list[list[int]]] = {}  # rule -> [references left, owner] that wait for it
    ready: list[int] = []
    for rule in range(len(grammar.rules)):
        for sequence in grammar.alternatives(rule):
            if any(kind != Kind.RULE_REF for kind, _ in sequence):
                continue
            if not sequence:
                ready.append(rule)
            entry = [len(sequence), rule]
            for _, reference in sequence:
                waiting.setdefault(reference, []).append(entry)
    while ready:
        rule = ready.pop()
        if nullable[rule]:
            continue
        nullable[rule] = True
        for entry in waiting.get(rule, []):
            entry[0] -= 1
            if entry[0] == 0:
                ready.append(entry[1])
    return nullable


def check_left_recursion(grammar: Grammar) -> None:
    """Refuses left recursion, and leftmost references too deep or too many for libllama's search.

    libllama walks every leftmost path without remembering what it saw: the walk's length is
    computed here over the acyclic graph of leftmost references.
    """
    nullable = _nullable(grammar)
    leftmost: list[list[int]] = [[] for _ in grammar.rules]
    for rule in range(len(grammar.rules)):
        for sequence in grammar.alternatives(rule):
            for kind, value in sequence:
                if kind != Kind.RULE_REF:
                    break
                leftmost[rule].append(value)
                if not nullable[value]:
                    break
    paths: dict[int, int] = {}
    depth: dict[int, int] = {}
    for start in range(len(leftmost)):
        _walk(grammar, leftmost, start, paths, depth)


def _walk(
    grammar: Grammar,
    leftmost: list[list[int]],
    start: int,
    paths: dict[int, int],
    depth: dict[int, int],
) -> None:
    """Depth first, without recursion: fills `paths` and `depth` of all rules from `start` on."""
    open_rules: set[int] = set()
    stack = [start]
    while stack:
        rule = stack[-1]
        if rule in paths:
            stack.pop()
            continue
        pending = [other for other in leftmost[rule] if other not in paths]
        if rule not in open_rules:
            open_rules.add(rule)
            for other in pending:
                if other in open_rules:
                    raise _refused(
                        f"left recursion: rule {grammar.names[other]!r} can begin with itself"
                    )
            stack.extend(pending)
            if pending:
                continue
        paths[rule] = 1 + sum(paths[other] for other in leftmost[rule])
        depth[rule] = 1 + max((depth[other] for other in leftmost[rule]), default=0)
        open_rules.discard(rule)
        stack.pop()
        if paths[rule] > MAX_LEFT_PATHS or depth[rule] > MAX_LEFT_DEPTH:
            raise _refused(
                f"rule {grammar.names[rule]!r}: expected at most {MAX_LEFT_PATHS} ways to begin, "
                f"{MAX_LEFT_DEPTH} rules deep, got more"
            )


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"grammar: {message}", param="grammar")
