"""A grammar at work on tokens: which may come next, and what was accepted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.automaton import DEAD, MAX_VISITS, VISITS_PER_TOKEN, Automaton
from loragraph.engine.gbnf import parse_grammar
from loragraph.errors import InvalidRequestError
from loragraph.vocab.pieces import WHOLE, Partial, decode
from loragraph.vocab.vocab import Vocab

_MAX_MASKS = 64  # remembered per grammar; each at most 4 bytes a token of the vocabulary


class GrammarMatcher:
    """Where one sequence stands in a grammar. `vocab` must outlive it; one thread at a time."""

    def __init__(self, vocab: Vocab, automaton: Automaton) -> None:
        self._vocab = vocab
        self._index = vocab.piece_index
        self._automaton = automaton
        self._masks: dict[tuple[int, Partial], NDArray[np.int32]] = {}
        self.reset()

    @classmethod
    def parse(cls, vocab: Vocab, text: str) -> GrammarMatcher:
        """Compiles a GBNF text whose start rule is `root`; InvalidRequestError if it is refused."""
        return cls(vocab, Automaton(parse_grammar(text)))

    def reset(self) -> None:
        """Back to the start of the grammar."""
        self._state = self._automaton.start
        self._partial = WHOLE

    def clone(self) -> GrammarMatcher:
        """An independent copy at the same place; it shares what was found out so far."""
        other = GrammarMatcher(self._vocab, self._automaton)
        other._state, other._partial, other._masks = self._state, self._partial, self._masks
        return other

    @property
    def may_end(self) -> bool:
        """True where the text so far is a whole sentence of the grammar."""
        return self._partial == WHOLE and self._automaton.may_end(self._state)

    def allows(self, token: int) -> bool:
        """True where `token` may come next."""
        if token in self._vocab.eog_tokens:
            return self.may_end
        return self._after(token) is not None

    def accept(self, token: int) -> None:
        """Moves on by one token; InvalidRequestError, without moving, where it is forbidden."""
        if token in self._vocab.eog_tokens:
            if not self.may_end:
                raise self._forbidden(token)
            return
        after = self._after(token)
        if after is None:
            raise self._forbidden(token)
        self._state, self._partial = after
        visits = self._automaton.visits_left + VISITS_PER_TOKEN
        self._automaton.visits_left = min(visits, MAX_VISITS)

    def allowed_tokens(self) -> NDArray[np.int32]:
        """All tokens that may come next, (n,) i32, ascending."""
        key = (self._state, self._partial)
        mask = self._masks.get(key)
        if mask is None:
            found = self._all() if self._partial == WHOLE else self._all_continuations()
            if self.may_end:
                found += self._vocab.eog_tokens
            mask = np.array(sorted(found), np.int32)
            if len(self._masks) >= _MAX_MASKS:
                self._masks.pop(next(iter(self._masks)))
            self._masks[key] = mask
        return mask

    def _after(self, token: int) -> tuple[int, Partial] | None:
        """State and unfinished character after `token`; None where it is forbidden."""
        piece = self._index.pieces[token]
        if not piece:
            return None
        chars, partial = decode(piece, self._partial)
        if partial[1] < 0:
            return None
        state = self._state
        for char in chars:
            state = self._automaton.step(state, char)
        if state == DEAD or (partial[1] and not self._automaton.may_complete(state, partial)):
            return None
        return state, partial

    def _all(self) -> list[int]:
        """Allowed tokens, each beginning matched once: those that fail alike are skipped."""
        order, shared, step = self._index.order, self._index.shared, self._automaton.step
        found: list[int] = []
        states = [self._state]  # states[n]: after n code points of the entry at hand
        at = 0
        while at < len(order):
            chars, partial, token = order[at]
            del states[shared[at] + 1 :]
            state = states[-1]
            for char in chars[len(states) - 1 :]:
                state = step(state, char)
                if state == DEAD:
                    break
                states.append(state)
            at += 1
            if state == DEAD:
                n_matched = len(states) - 1
                at = at if n_matched else self._index.ends[chars[0]]
                while at < len(order) and shared[at] > n_matched:
                    at += 1
            elif not partial[1] or self._automaton.may_complete(state, partial):
                found.append(token)
        return found

    def _all_continuations(self) -> list[int]:
        tokens = self._index.continuations  # nothing else may follow an unfinished character
        return [token for token in tokens if self._after(token) is not None]

    def _forbidden(self, token: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"token {token} ({self._vocab.piece(token)!r}) is not what the grammar allows next",
            param="grammar",
        )
