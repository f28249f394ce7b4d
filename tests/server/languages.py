"""The languages of grammars, for tests of what makes grammars."""

from __future__ import annotations

import random

from loragraph.engine.automaton import DEAD, Automaton
from loragraph.engine.gbnf import parse_grammar

_SAMPLES = [*'{}[]",:-.0123456789eE \nabcdefnqrstulxyz\\/_@+~é漢Z😀', "\t", "\x7f", "\u2028"]


class Language:
    """The texts that a grammar allows."""

    def __init__(self, grammar: str) -> None:
        self._automaton = Automaton(parse_grammar(grammar))

    def __contains__(self, text: str) -> bool:
        state = self._automaton.start
        for char in text:
            state = self._automaton.step(state, ord(char))
            if state == DEAD:
                return False
        return self._automaton.may_end(state)

    def draw(self, rng: random.Random, n_most: int = 400) -> str | None:
        """A text, one allowed character after the other; None for one that is not whole by then."""
        state, text = self._automaton.start, ""
        while len(text) < n_most:
            closing = len(text) > n_most // 4
            if self._automaton.may_end(state) and (closing or rng.random() < 0.3):
                return text
            moves = [
                (char, after)
                for char in _SAMPLES
                if (after := self._automaton.step(state, ord(char))) != DEAD
            ]
            if not moves:
                assert self._automaton.may_end(state), f"no way on behind {text!r}"
                return text
            ends = [move for move in moves if move[0] in '"]}']
            char, state = rng.choice(ends if closing and ends else moves)
            text += char
        return None
