"""The pushdown automaton of a grammar, made deterministic as far as it is walked.

llama-grammar.cpp follows every way to read a text separately: `("a"?){40}` costs it 2^40 steps on a
token of forty letters. Here the ways that lead to the same stacks are one state, whose transitions
are remembered; what it costs to find new states is bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from loragraph.engine.gbnf_rules import Grammar, Kind
from loragraph.errors import InvalidRequestError
from loragraph.vocab.pieces import Partial

MAX_STACKS = 512
"""Most stacks (ways in which the text so far can be read) that a state may have."""

MAX_VISITS = 2_000_000
VISITS_PER_TOKEN = 2_000
"""Stacks that may be looked at while new states are found: in all, and more for each token."""

DEAD = 0
"""The state without stacks: what was read is forbidden."""

_EMPTY = 0  # the empty stack: the grammar's end
_LEAST_CHAR = (0, 0, 1 << 11, 1 << 16)  # of a character, by its number of missing bytes
_ENDS = (Kind.END, Kind.ALT)


class Automaton:
    """States are numbers; `start` is the first. Not for several threads at once."""

    def __init__(self, grammar: Grammar) -> None:
        self._kinds: list[Kind] = []
        self._values: list[int] = []
        offsets = []
        for rule in grammar.rules:
            offsets.append(len(self._kinds))
            self._kinds += [kind for kind, _ in rule]
            self._values += [value for _, value in rule]
        self._starts = [self._alternatives(offset) for offset in offsets]
        self._bounds = self._boundaries()
        # a stack is its top (a position) on another stack; equal stacks are one number
        self._stacks: list[tuple[int, int]] = [(-1, -1)]
        self._stack_ids: dict[tuple[int, int], int] = {}
        self._states: list[tuple[int, ...]] = [()]
        self._state_ids: dict[tuple[int, ...], int] = {(): DEAD}
        self._moves: list[dict[int, int]] = [{}]
        self.visits_left = MAX_VISITS
        first = [self._push(at, _EMPTY) for at in self._starts[grammar.root]]
        self.start = self._state(first)

    def may_end(self, state: int) -> bool:
        """True where the text that led to `state` is complete."""
        return _EMPTY in self._states[state]

    def step(self, state: int, char: int) -> int:
        """The state after one more code point; DEAD where it is forbidden."""
        moves = self._moves[state]
        interval = bisect_right(self._bounds, char)  # no class tells its characters apart
        after = moves.get(interval)
        if after is None:
            after = moves[interval] = self._step(state, char)
        return after

    def may_complete(self, state: int, partial: Partial) -> bool:
        """True where some character that begins with `partial` may come next."""
        value, missing = partial
        if missing < 0 or (missing == 1 and value < 2):  # broken, or longer than it need be
            return False
        low = value << (6 * missing)
        high = low | ((1 << (6 * missing)) - 1)
        if low == 0:
            low = _LEAST_CHAR[missing]
        tops = (self._stacks[stack][0] for stack in self._states[state] if stack != _EMPTY)
        return any(self._overlaps(top, low, high) for top in tops)

    def _step(self, state: int, char: int) -> int:
        moved = []
        for stack in self._states[state]:
            if stack != _EMPTY:
                top, rest = self._stacks[stack]
                matches, after = self._match(top, char)
                if matches:
                    moved.append(self._push(after, rest))
        return self._state(moved)

    def _state(self, stacks: Iterable[int]) -> int:
        """The state of these stacks, rule references on their tops replaced."""
        todo = list(stacks)
        seen: set[int] = set()
        result: set[int] = set()
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            self._visit(len(result))
            top, rest = self._stacks[stack]
            if stack == _EMPTY or self._kinds[top] != Kind.RULE_REF:
                result.add(stack)
                continue
            rest = self._push(top + 1, rest)
            todo += [self._push(at, rest) for at in self._starts[self._values[top]]]
        key = tuple(sorted(result))
        state = self._state_ids.setdefault(key, len(self._states))
        if state == len(self._states):
            self._states.append(key)
            self._moves.append({})
        return state

    def _visit(self, n_stacks: int) -> None:
        self.visits_left -= 1
        if n_stacks > MAX_STACKS or self.visits_left < 0:
            raise InvalidRequestError(
                f"grammar: expected at most {MAX_STACKS} ways to read a text, got more",
                param="grammar",
                hint="alternatives that begin alike and then refer to the same rule multiply",
            )

    def _push(self, position: int, rest: int) -> int:
        """The stack `position` on `rest`; `rest` itself at the end of a sequence."""
        if self._kinds[position] in _ENDS:
            return rest
        key = (position, rest)
        stack = self._stack_ids.get(key)
        if stack is None:
            stack = self._stack_ids[key] = len(self._stacks)
            self._stacks.append(key)
        return stack

    def _match(self, at: int, char: int) -> tuple[bool, int]:
        """Does the character class at `at` match, and where does it end?"""
        kinds, values = self._kinds, self._values
        positive = kinds[at] != Kind.CHAR_NOT
        found = False
        while True:
            if kinds[at + 1] == Kind.CHAR_RNG_UPPER:
                found = found or values[at] <= char <= values[at + 1]
                at += 2
            else:
                found = found or kinds[at] == Kind.CHAR_ANY or values[at] == char
                at += 1
            if kinds[at] != Kind.CHAR_ALT:
                return found == positive, at

    def _overlaps(self, at: int, low: int, high: int) -> bool:
        """Does a character in [low, high] match? As in libllama, for [^...] all of them must."""
        kinds, values = self._kinds, self._values
        positive = kinds[at] != Kind.CHAR_NOT
        while True:
            if kinds[at + 1] == Kind.CHAR_RNG_UPPER:
                touches = values[at] <= high and low <= values[at + 1]
                at += 2
            else:
                touches = kinds[at] == Kind.CHAR_ANY or low <= values[at] <= high
                at += 1
            if touches:
                return positive
            if kinds[at] != Kind.CHAR_ALT:
                return not positive

    def _alternatives(self, at: int) -> list[int]:
        """Where each alternative of the rule at `at` begins; an empty one at its end."""
        starts = [at]
        while self._kinds[at] != Kind.END:
            if self._kinds[at] == Kind.ALT:
                starts.append(at + 1)
            at += 1
        return starts

    def _boundaries(self) -> list[int]:
        """Code points before which some class's answer may change, sorted."""
        bounds = set()
        for at, (kind, value) in enumerate(zip(self._kinds, self._values, strict=True)):
            if kind in (Kind.CHAR, Kind.CHAR_NOT, Kind.CHAR_ALT):
                bounds.add(value)
                ranged = self._kinds[at + 1] == Kind.CHAR_RNG_UPPER
                bounds.add(self._values[at + 1] + 1 if ranged else value + 1)
        return sorted(bounds)
