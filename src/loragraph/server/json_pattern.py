"""Regular expressions as GBNF: of JSON schemas, for texts inside JSON strings, and of whole texts.

In JSON every character of the text stands as JSON writes it: quotes, backslashes and control
characters escaped. What regular grammars cannot do (look-around, back references) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from loragraph.errors import InvalidRequestError
from loragraph.server.gbnf_parts import (
    NOTHING,
    Part,
    either,
    joined,
    literal,
    repeated,
    rules_of_texts,
    symbol,
)

MAX_PATTERN = 1000
MAX_DEPTH = 24
MAX_REPETITIONS = 2000
MAX_TEXT = 1 << 17

Ranges = tuple[tuple[int, int], ...]
Char = Callable[[Ranges], str]
_Anchored = dict[tuple[bool, bool], Part]  # by whether it begins and ends where the text does

_FREE = (False, False)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}

_LAST = 0x10FFFF
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "b": 0x08, "v": 0x0B, "0": 0x00}
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
# Escaped in JSON: control characters, the quote, the backslash. Halves of surrogate pairs are no
# characters.
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
ANY_CHAR = "char"
"""The rule of any one character inside a JSON string."""


def pattern_rule(pattern: str, char: Char | None = None) -> str:
    """GBNF of a JSON string whose text matches; unanchored ends may be followed by anything.

    `char`: one symbol of GBNF for one character of some ranges; default: `json_char`.
    """
    found = []
    for (starts, ends), part in _Parser(pattern, char or json_char).parse().items():
        begin = "" if starts else f"{ANY_CHAR}* "
        found.append(f"{begin}{part.whole.at(1)}{'' if ends else f' {ANY_CHAR}*'}")
    body = found[0] if len(found) == 1 else f"({' | '.join(found)})"
    return f'"\\"" {body} "\\""'


def regex_grammar(pattern: str) -> str:
    """GBNF, start rule `root`, of the texts that match from their begin to their end."""
    found = _Parser(pattern, _plain_char).parse()  # whose anchors change nothing here
    return f"root ::= {' | '.join(part.whole.at(2) for part in found.values())}\n"


def choice_grammar(texts: Sequence[str]) -> str:
    """GBNF, start rule `root`, of these texts and no others."""
    rules = rules_of_texts(texts, "root", param="choice")
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def json_char(ranges: Iterable[tuple[int, int]]) -> str:
    """GBNF of one character of these ranges, as it stands in a JSON string."""
    wanted = _without(_normal(ranges), _SURROGATES)
    plain = _without(wanted, _ESCAPED)
    parts = [_class(plain)] if plain else []
    escaped = _without(wanted, _without(((0, _LAST),), _ESCAPED))
    for low, high in escaped:
        parts += [_escape(code) for code in range(low, high + 1)]
    if not parts:
        raise InvalidRequestError("pattern: a character class is empty", param="pattern")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, char: Char) -> None:
        """`char`: one symbol of GBNF for one character of some ranges."""
        if len(pattern) > MAX_PATTERN:
            raise _refused(pattern, f"expected at most {MAX_PATTERN} characters")
        self._char = char
        self._text = pattern
        self._pos = 0
        self._depth = 0

    def parse(self) -> _Anchored:
        """What matches, by where it has to stand; never without an entry."""
        found = self._alternation()
        if self._pos != len(self._text):
            raise self._fail("no unbalanced parenthesis")
        if not found:
            raise self._fail("'^' and '$' where some text can match, at its begin and its end")
        return found

    def _alternation(self) -> _Anchored:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fail(f"at most {MAX_DEPTH} nested groups")
        found = self._sequence()
        while self._peek() == "|":
            self._pos += 1
            for key, part in self._sequence().items():
                _add(found, key, part)
        self._depth -= 1
        return self._bounded(found)

    def _sequence(self) -> _Anchored:
        found: _Anchored = {_FREE: NOTHING}
        while self._peek() not in ("", "|", ")"):
            found = self._bounded(_after(found, self._quantified(self._atom())))
        return found

    def _bounded(self, found: _Anchored) -> _Anchored:
        if sum(len(part.whole.text) for part in found.values()) > MAX_TEXT:
            raise self._fail(f"what takes at most {MAX_TEXT} characters of grammar")
        return found

    def _atom(self) -> _Anchored:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                if self._text[self._pos : self._pos + 2] != "?:":
                    raise self._fail("no look-around and no named groups")
                self._pos += 2
            found = self._alternation()
            if self._next() != ")":
                raise self._fail("')'")
            return found
        if char in ("^", "$"):
            return {(char == "^", char == "$"): NOTHING}
        if char == "[":
            ranges = self._set()
        elif char == ".":
            ranges = _complement(((0x0A, 0x0A), (0x0D, 0x0D)))
        elif char == "\\":
            ranges = self._escaped()
        elif char in "*+?{}":
            raise self._fail(f"'{char}' to be escaped here")
        else:
            ranges = ((ord(char), ord(char)),)
        return {_FREE: symbol(self._char(ranges))}

    def _quantified(self, found: _Anchored) -> _Anchored:
        char = self._peek()
        if not char or char not in "*+?{":
            return found
        self._pos += 1
        low, high = self._times() if char == "{" else _TIMES[char]
        if self._peek() in ("?", "+") and self._peek():
            self._pos += 1  # lazy or possessive: the same texts match
        if (low, high) == (0, 1):
            out = dict(found)
            _add(out, _FREE, NOTHING)
            out[_FREE] = repeated(found.get(_FREE, NOTHING), 0, 1)
            return out
        if set(found) - {_FREE}:
            raise self._fail("no '^' or '$' inside of what is repeated")
        if not found:  # what never matches
            return {_FREE: NOTHING} if low == 0 else {}
        return {_FREE: repeated(found[_FREE], low, high)}

    def _times(self) -> tuple[int, int | None]:
        """The bounds behind a '{'; without a lower one 0, as in Python."""
        match = re.compile(r"([0-9]{0,5})(,?)([0-9]{0,5})\}").match(self._text, self._pos)
        if match is None or not (match[1] or match[2]):
            raise self._fail("{m}, {m,}, {,n} or {m,n}")
        self._pos = match.end()
        low = int(match[1] or 0)
        high = int(match[3]) if match[3] else None if match[2] else low
        if max(low, high or 0) > MAX_REPETITIONS or (high is not None and high < low):
            raise self._fail(f"0 to {MAX_REPETITIONS} repetitions")
        return low, high

    def _set(self) -> Ranges:
        """The ranges of a class, behind its '['."""
        negated = self._peek() == "^"
        self._pos += negated
        ranges: list[tuple[int, int]] = []
        first = True
        while self._peek() != "]" or first:
            low = self._member()
            first = False
            follows = self._text[self._pos + 1 : self._pos + 2]
            if self._peek() == "-" and follows != "]" and len(low) == 1 and low[0][0] == low[0][1]:
                self._pos += 1
                high = self._member()
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._fail("a range of characters in order")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        self._pos += 1
        return _complement(ranges) if negated else _normal(ranges)

    def _member(self) -> Ranges:
        char = self._next()
        if not char:
            raise self._fail("']'")
        return self._escaped() if char == "\\" else ((ord(char), ord(char)),)

    def _escaped(self) -> Ranges:
        """What stands behind a backslash."""
        char = self._next()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return ranges if char.islower() else _complement(ranges)
        if char in ("x", "u"):
            n = 2 if char == "x" else 4
            digits = self._text[self._pos : self._pos + n]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{n}}}", digits):
                raise self._fail(f"{n} hexadecimal digits")
            self._pos += n
            return ((int(digits, 16), int(digits, 16)),)
        if char == "b" or (char.isalnum() and char not in _CONTROLS):
            raise self._fail(f"no '\\{char}'")
        code = _CONTROLS.get(char, ord(char) if char else -1)
        if code < 0:
            raise self._fail("a character behind the backslash")
        return ((code, code),)

    def _peek(self) -> str:
        return self._text[self._pos : self._pos + 1]

    def _next(self) -> str:
        char = self._peek()
        self._pos += len(char)
        return char

    def _fail(self, expected: str) -> InvalidRequestError:
        return _refused(self._text, f"expected {expected} (at {self._pos})")


def _add(found: _Anchored, key: tuple[bool, bool], part: Part) -> None:
    found[key] = either(found[key], part) if key in found else part


def _after(first: _Anchored, then: _Anchored) -> _Anchored:
    """`then` behind `first`: nothing lies before '^', and nothing behind '$'."""
    found: _Anchored = {}
    for (first_starts, first_ends), one in first.items():
        for (starts, ends), other in then.items():
            if (first_ends and not other.nullable) or (starts and not one.nullable):
                continue
            part = joined(NOTHING if starts else one, NOTHING if first_ends else other)
            _add(found, (first_starts or starts, first_ends or ends), part)
    return found


def _plain_char(ranges: Ranges) -> str:
    """GBNF of one character of these ranges, as it is; never NUL, where libllama's texts end."""
    wanted = _without(_without(_normal(ranges), _SURROGATES), ((0, 0),))
    if not wanted:
        raise InvalidRequestError("pattern: a character class is empty", param="pattern")
    return _class(wanted)


def _class(ranges: Ranges) -> str:
    parts = [_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges]
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08X}"


def _escape(code: int) -> str:
    short = _SHORT.get(code)
    return literal(f"\\{short}" if short else f"\\u{code:04x}")


def _normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    return _without(((0, _LAST),), _normal(ranges))


def _without(ranges: Sequence[tuple[int, int]], cut: Ranges) -> Ranges:
    """`ranges` less `cut`; both in order, without overlaps."""
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in cut:
            if last < low or first > high:
                continue
            if first > low:
                left.append((low, first - 1))
            low = last + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)


def _refused(pattern: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"pattern {pattern!r:.80}: {why}", param="pattern")
