"""A grammar at work: libllama masks the candidates, a shadow of its automaton guards the calls.

libllama ends the process when it is told to accept a token that the grammar does not allow, and its
set of stacks can grow without bound. The shadow steps through the accepted text in the same way and
says no beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from loragraph.engine.gbnf import parse_grammar
from loragraph.engine.gbnf_rules import Element, Grammar, Kind
from loragraph.errors import InvalidRequestError
from loragraph.ggml.handles import Handle
from loragraph.vocab.vocab import Vocab

MAX_STACKS = 512
"""Most stacks (ways in which the text so far can be read) that a grammar may have at once."""

_MAX_VISITED = 1 << 14
_MAX_STACK_DEPTH = 1 << 12
_PROBE_STEPS = 48
_PROBE_WORK = 40_000
_LEAST_CHAR = (0, 0, 1 << 11, 1 << 16)  # by the number of missing bytes
_UTF8_LENGTH = (1,) * 8 + (0,) * 4 + (2, 2, 3, 4)  # by the first byte's upper four bits

Position = tuple[int, int]
"""(rule, index of an element in it)."""
Stack = tuple[Position, ...]
Partial = tuple[int, int]
"""An unfinished UTF-8 character: (bits so far, bytes that are missing)."""


class Automaton:
    """The pushdown automaton of llama-grammar.cpp over a checked grammar; immutable."""

    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._starts = [list(_starts(rule)) for rule in grammar.rules]
        first = [((grammar.root, at),) if at >= 0 else () for at in self._starts[grammar.root]]
        self.initial = self.advance(first)

    def advance(self, stacks: Iterable[Stack]) -> tuple[Stack, ...]:
        """Replaces rule references on top until every stack is empty or ends at a character."""
        todo = list(stacks)
        seen: set[Stack] = set()
        result: dict[Stack, None] = {}
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if len(seen) > _MAX_VISITED or len(stack) > _MAX_STACK_DEPTH:
                raise _too_ambiguous(len(seen))
            if not stack or self._element(stack[-1])[0] != Kind.RULE_REF:
                result[stack] = None
                if len(result) > MAX_STACKS:
                    raise _too_ambiguous(len(result))
                continue
            rule, index = stack[-1]
            base = stack[:-1] + self._after((rule, index + 1))
            reference = self._element((rule, index))[1]
            for at in self._starts[reference]:
                todo.append((*base, (reference, at)) if at >= 0 else base)
        return tuple(result)

    def step(self, stacks: tuple[Stack, ...], char: int) -> tuple[Stack, ...]:
        """The stacks after one code point; none where it is not allowed."""
        moved = []
        for stack in stacks:
            if stack:
                matches, after = self._match(stack[-1], char)
                if matches:
                    moved.append(stack[:-1] + self._after(after))
        return self.advance(moved)

    def may_complete(self, stacks: tuple[Stack, ...], partial: Partial) -> bool:
        """True where some character that begins with `partial` is allowed next."""
        value, missing = partial
        if missing < 0 or (missing == 1 and value < 2):  # broken, or longer than it need be
            return False
        low = value << (6 * missing)
        high = low | ((1 << (6 * missing)) - 1)
        if low == 0:
            low = _LEAST_CHAR[missing]
        return any(self._overlaps(stack[-1], low, high) for stack in stacks if stack)

    def boundaries(self, stack: Stack) -> Iterable[int]:
        """Code points at which the character class on top of `stack` begins, or just ends."""
        if not stack:
            return
        rule, index = stack[-1]
        elements = self._rules[rule]
        while True:
            kind, value = elements[index]
            if kind == Kind.CHAR_ANY:
                yield ord("a")
            elif kind == Kind.CHAR_RNG_UPPER:
                yield value
                yield value + 1
            else:
                yield value
                if kind == Kind.CHAR_NOT:
                    yield value + 1
            index += 1
            if elements[index][0] not in (Kind.CHAR_ALT, Kind.CHAR_RNG_UPPER):
                return

    def _element(self, position: Position) -> Element:
        return self._rules[position[0]][position[1]]

    def _after(self, position: Position) -> Stack:
        """The position as a stack; nothing at the end of a sequence."""
        return () if self._element(position)[0] in (Kind.END, Kind.ALT) else (position,)

    def _overlaps(self, position: Position, low: int, high: int) -> bool:
        """Does a character in [low, high] match? For [^...], as in libllama, only where none of
        the excluded ranges touches it."""
        rule, index = position
        elements = self._rules[rule]
        positive = elements[index][0] != Kind.CHAR_NOT
        while True:
            kind, value = elements[index]
            if elements[index + 1][0] == Kind.CHAR_RNG_UPPER:
                touches = value <= high and low <= elements[index + 1][1]
                index += 2
            else:
                touches = kind == Kind.CHAR_ANY or low <= value <= high
                index += 1
            if touches:
                return positive
            if elements[index][0] != Kind.CHAR_ALT:
                return not positive

    def _match(self, position: Position, char: int) -> tuple[bool, Position]:
        rule, index = position
        elements = self._rules[rule]
        positive = elements[index][0] != Kind.CHAR_NOT
        found = False
        while True:
            kind, value = elements[index]
            if elements[index + 1][0] == Kind.CHAR_RNG_UPPER:
                found = found or value <= char <= elements[index + 1][1]
                index += 2
            else:
                found = found or kind == Kind.CHAR_ANY or value == char
                index += 1
            if elements[index][0] != Kind.CHAR_ALT:
                return found == positive, (rule, index)


class GrammarState:
    """What the accepted bytes left possible."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self.reset()

    def reset(self) -> None:
        """Back to the start."""
        self._stacks = self._automaton.initial
        self._partial: Partial = (0, 0)

    def copy(self) -> GrammarState:
        """An independent state at the same place."""
        other = GrammarState(self._automaton)
        other._stacks, other._partial = self._stacks, self._partial
        return other

    @property
    def may_end(self) -> bool:
        """True where the text so far is complete."""
        return () in self._stacks

    def accept(self, piece: bytes) -> bool:
        """Moves on over `piece`; False, without moving, where the grammar forbids it."""
        chars, partial = decode(piece, self._partial)
        stacks = tuple(stack for stack in self._stacks if stack)
        for char in chars:
            stacks = self._automaton.step(stacks, char)
        if not stacks or (partial[1] and not self._automaton.may_complete(stacks, partial)):
            return False
        self._stacks, self._partial = stacks, partial
        return True


class GrammarSampler(Handle):
    """Owner of a libllama grammar sampler and its shadow; `vocab` must outlive it."""

    def __init__(self, vocab: Vocab, automaton: Automaton, ptr: Any, state: GrammarState) -> None:
        super().__init__(vocab.lib, ptr, "grammar")
        self._vocab = vocab
        self._automaton = automaton
        self._state = state

    @classmethod
    def parse(cls, vocab: Vocab, text: str) -> Self:
        """Compiles a GBNF text whose start rule is `root`; InvalidRequestError if it is refused."""
        automaton = Automaton(parse_grammar(text))
        _probe(automaton)
        c = vocab.lib.c
        with vocab.lib.log_lines() as lines:
            ptr = c.llama_sampler_init_grammar(vocab.vocab_ptr, text.encode(), b"root")
        if ptr == vocab.lib.ffi.NULL:
            raise InvalidRequestError(
                f"grammar: {'; '.join(lines) or 'libllama refused it'}", param="grammar"
            )
        return cls(vocab, automaton, ptr, GrammarState(automaton))

    def apply(self, candidates: Any) -> None:
        """Sets the logits of forbidden candidates (a `llama_token_data_array *`) to -inf."""
        self.lib.c.llama_sampler_apply(self.ptr, candidates)

    def allows(self, token: int) -> bool:
        """True where `token` may come next: what accept() would say, without moving."""
        if self._vocab.is_eog(token):
            return self._state.may_end
        piece = _until_nul(self._vocab.piece(token))
        return bool(piece) and self._state.copy().accept(piece)

    def accept(self, token: int) -> None:
        """Moves on by one token; InvalidRequestError, without moving, where it is forbidden."""
        if self._vocab.is_eog(token):
            if not self._state.may_end:
                raise _forbidden(self._vocab, token)
            return
        piece = _until_nul(self._vocab.piece(token))
        if not piece or not self._state.accept(piece):
            raise _forbidden(self._vocab, token)
        self.lib.c.llama_sampler_accept(self.ptr, token)

    def reset(self) -> None:
        """Back to the start of the grammar."""
        self.lib.c.llama_sampler_reset(self.ptr)
        self._state.reset()

    def clone(self) -> GrammarSampler:
        """An independent copy at the same place in the grammar."""
        ptr = self.lib.c.llama_sampler_clone(self.ptr)
        return GrammarSampler(self._vocab, self._automaton, ptr, self._state.copy())

    def _free(self, ptr: Any) -> None:
        self.lib.c.llama_sampler_free(ptr)


def decode(piece: bytes, partial: Partial) -> tuple[list[int], Partial]:
    """Code points of `piece` after an unfinished character, and the unfinished one at its end.

    As lenient as llama-grammar.cpp: an invalid sequence gives no code points and a partial of
    (0, -1), and a lead byte swallows what follows it.
    """
    value, missing = partial
    chars: list[int] = []
    at = 0
    while at < len(piece) and missing > 0:
        if piece[at] >> 6 != 2:
            return [], (0, -1)
        value = (value << 6) + (piece[at] & 0x3F)
        at += 1
        missing -= 1
    if partial[1] > 0 and missing == 0:
        chars.append(value)
    while at < len(piece):
        missing = _UTF8_LENGTH[piece[at] >> 4] - 1
        if missing < 0:
            return [], (0, missing)
        value = piece[at] & ((1 << (7 - missing)) - 1)
        at += 1
        while at < len(piece) and missing > 0:
            value = (value << 6) + (piece[at] & 0x3F)
            at += 1
            missing -= 1
        if missing == 0:
            chars.append(value)
    return chars, (value, missing)


def _starts(rule: list[Element]) -> Iterable[int]:
    """Index of each alternative's first element, -1 for an empty alternative."""
    at = 0
    while True:
        empty = rule[at][0] in (Kind.END, Kind.ALT)
        yield -1 if empty else at
        while rule[at][0] not in (Kind.END, Kind.ALT):
            at += 1
        if rule[at][0] == Kind.END:
            return
        at += 1


def _probe(automaton: Automaton) -> None:
    """Looks for texts whose number of readings explodes, greedily and with bounded work.

    At every step the code point that leaves the most and deepest stacks is taken: exponential
    growth passes MAX_STACKS within a few steps.
    """
    stacks = automaton.initial
    work = 0
    for _ in range(_PROBE_STEPS):
        chars = sorted({char for stack in stacks for char in automaton.boundaries(stack)})
        best: tuple[Stack, ...] = ()
        best_size = (0, 0)
        for char in chars[:64]:
            after = automaton.step(stacks, char)
            size = (len(after), sum(map(len, after)))
            work += len(stacks) + len(after)
            if size > best_size:
                best, best_size = after, size
        stacks = best
        if not stacks or work > _PROBE_WORK:
            return


def _too_ambiguous(n: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"grammar: expected at most {MAX_STACKS} ways to read a text, got {n} or more",
        param="grammar",
        hint="alternatives that begin alike and then refer to the same rule multiply",
    )


def _forbidden(vocab: Vocab, token: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"token {token} ({vocab.piece(token)!r}) is not what the grammar allows next",
        param="grammar",
    )


def _until_nul(piece: bytes) -> bytes:
    """What libllama's decoder, which stops at a NUL, sees of a piece."""
    return piece.split(b"\0", 1)[0]
