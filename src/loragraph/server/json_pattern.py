"""Regular expressions as GBNF: of JSON schemas, for texts inside JSON strings, and of whole texts.

In JSON every character of the text stands as JSON writes it: quotes, backslashes and control
characters escaped. What regular grammars cannot do (look-around, back references) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from loragraph.errors import InvalidRequestError

MAX_PATTERN = 1000
MAX_DEPTH = 24
MAX_REPETITIONS = 2000

_Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_DIGIT: _Ranges = ((0x30, 0x39),)
_WORD: _Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: _Ranges = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "b": 0x08, "v": 0x0B, "0": 0x00}
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
# Escaped in JSON: control characters, the quote, the backslash. Halves of surrogate pairs are no
# characters.
_ESCAPED: _Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SURROGATES: _Ranges = ((0xD800, 0xDFFF),)
ANY_CHAR = "char"
"""The rule of any one character inside a JSON string."""


def pattern_rule(pattern: str) -> str:
    """GBNF of a JSON string whose text matches; unanchored ends may be followed by anything."""
    if len(pattern) > MAX_PATTERN:
        raise _refused(pattern, f"expected at most {MAX_PATTERN} characters")
    body = _Parser(pattern).parse()
    return f'"\\"" {body} "\\""'


def regex_grammar(pattern: str) -> str:
    """GBNF, start rule `root`, of the texts that match from their begin to their end."""
    if len(pattern) > MAX_PATTERN:
        raise _refused(pattern, f"expected at most {MAX_PATTERN} characters")
    return f"root ::= {_Parser(pattern, _plain_char).parse_whole()}\n"


def choice_grammar(texts: Sequence[str]) -> str:
    """GBNF, start rule `root`, of these texts and no others."""
    return f"root ::= {' | '.join(literal(text) for text in texts)}\n"


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


def literal(text: str) -> str:
    """GBNF of a text itself."""
    quoted = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(quoted.get(char, char) for char in text) + '"'


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, char: Callable[[_Ranges], str] | None = None) -> None:
        """`char`: GBNF of one character of some ranges; default: as JSON writes it."""
        self._char = char or json_char
        self._text = pattern
        self._pos = 0
        self._depth = 0

    def parse(self) -> str:
        """The GBNF, without the quotes around it."""
        starts = self._text.startswith("^")
        self._pos = int(starts)
        body = self._alternation()
        ends = self._peek() == "$"
        self._pos += ends
        if self._pos != len(self._text):
            raise self._fail("no unbalanced parenthesis, and '$' only at the end")
        parts = [] if starts else [f"{ANY_CHAR}*"]
        parts += [body] if body else []
        return " ".join(parts + ([] if ends else [f"{ANY_CHAR}*"])) or '""'

    def parse_whole(self) -> str:
        """The GBNF of whole texts, which `^` and `$` change nothing about."""
        self._pos = int(self._text.startswith("^"))
        body = self._alternation()
        self._pos += self._peek() == "$"
        if self._pos != len(self._text):
            raise self._fail("no unbalanced parenthesis, and '$' only at the end")
        return body or '""'

    def _alternation(self) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fail(f"at most {MAX_DEPTH} nested groups")
        branches = [self._sequence()]
        while self._peek() == "|":
            self._pos += 1
            branches.append(self._sequence())
        self._depth -= 1
        if len(branches) == 1:
            return branches[0]
        return f"({' | '.join(branch or chr(34) * 2 for branch in branches)})"

    def _sequence(self) -> str:
        items: list[str] = []
        while self._peek() not in ("", "|", ")"):
            if self._peek() == "$" and self._pos == len(self._text) - 1:
                break
            items.append(self._quantified(self._atom()))
        return " ".join(items)

    def _atom(self) -> str:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                if self._text[self._pos : self._pos + 2] != "?:":
                    raise self._fail("no look-around and no named groups")
                self._pos += 2
            body = self._alternation()
            if self._next() != ")":
                raise self._fail("')'")
            return f"({body})" if body else '""'
        if char == "[":
            return self._char(self._set())
        if char == ".":
            return self._char(_complement(((0x0A, 0x0A), (0x0D, 0x0D))))
        if char == "\\":
            return self._char(self._escaped())
        if char in "*+?{}^$":
            raise self._fail(f"'{char}' to be escaped here")
        return self._char(((ord(char), ord(char)),))

    def _quantified(self, atom: str) -> str:
        char = self._peek()
        if not char or char not in "*+?{":
            return atom
        self._pos += 1
        if char == "{":
            found = re.compile(r"(\d{1,5})(,?)(\d{0,5})\}").match(self._text, self._pos)
            if found is None:
                raise self._fail("{m}, {m,} or {m,n}")
            self._pos = found.end()
            low, comma, high = found.groups()
            bounds = [int(low), int(high) if high else 0]
            if max(bounds) > MAX_REPETITIONS or (high and bounds[1] < bounds[0]):
                raise self._fail(f"0 to {MAX_REPETITIONS} repetitions")
            char = f"{{{low}{comma}{high}}}"
        if self._peek() in ("?", "+") and self._peek():
            self._pos += 1  # lazy or possessive: the same texts match
        return f"{atom}{char}"

    def _set(self) -> _Ranges:
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

    def _member(self) -> _Ranges:
        char = self._next()
        if not char:
            raise self._fail("']'")
        return self._escaped() if char == "\\" else ((ord(char), ord(char)),)

    def _escaped(self) -> _Ranges:
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


def _plain_char(ranges: _Ranges) -> str:
    """GBNF of one character of these ranges, as it is; never NUL, where libllama's texts end."""
    wanted = _without(_without(_normal(ranges), _SURROGATES), ((0, 0),))
    if not wanted:
        raise InvalidRequestError("pattern: a character class is empty", param="pattern")
    return _class(wanted)


def _class(ranges: _Ranges) -> str:
    parts = [_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges]
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08X}"


def _escape(code: int) -> str:
    short = _SHORT.get(code)
    return literal(f"\\{short}" if short else f"\\u{code:04x}")


def _normal(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    return _without(((0, _LAST),), _normal(ranges))


def _without(ranges: Sequence[tuple[int, int]], cut: _Ranges) -> _Ranges:
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
