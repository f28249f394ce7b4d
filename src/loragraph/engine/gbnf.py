"""GBNF grammars: text to rules, with everything bounded.

The rules are those that llama-grammar.cpp makes of the text. Its own code cannot be used on texts
of strangers: it recurses, loops for ever on `{3,2}`, searches left recursion in exponential time,
overlooks some, and ends the process when a token is accepted that the grammar forbids.
"""

from __future__ import annotations

from loragraph.engine.gbnf_rules import Element, Grammar, Kind, check_left_recursion
from loragraph.errors import InvalidRequestError, UnsupportedError

MAX_BYTES = 1 << 18
MAX_NESTING = 64
MAX_ELEMENTS = 1 << 17
MAX_REPETITIONS = 2000  # libllama's own threshold


def parse_grammar(text: str, root: str = "root") -> Grammar:
    """The rules of a GBNF text; InvalidRequestError for what libllama refuses or cannot bear."""
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as exc:
        raise _invalid(f"expected valid Unicode, got {exc.reason} at {exc.start}") from exc
    if not 0 < n_bytes <= MAX_BYTES:
        raise _invalid(f"expected 1 to {MAX_BYTES} bytes, got {n_bytes}")
    if "\0" in text:
        raise _invalid("expected text, got a NUL character")
    grammar = _Parser(text).parse(root)
    check_left_recursion(grammar)
    return grammar


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"grammar: {message}", param="grammar")


class _Parser:
    """Recursive descent over the text, giving the rules that libllama's parser gives."""

    def __init__(self, text: str) -> None:
        self._text = text + "\0"  # the sentinel that C has
        self._pos = 0
        self._ids: dict[str, int] = {}
        self._rules: dict[int, list[Element]] = {}
        self._n_elements = 0
        self._depth = 0

    def parse(self, root: str) -> Grammar:
        self._space(True)
        while self._peek() != "\0":
            self._rule()
        names = list(self._ids)
        for rule in range(len(names)):
            if rule not in self._rules:
                raise _invalid(f"expected a definition of rule {names[rule]!r}, got none")
        if root not in self._ids:
            raise _invalid(f"expected a rule {root!r}, got {', '.join(names[:8]) or 'none'}")
        return Grammar([self._rules[i] for i in range(len(names))], names, self._ids[root])

    def _peek(self, ahead: int = 0) -> str:
        at = self._pos + ahead
        return self._text[at] if at < len(self._text) else "\0"

    def _fail(self, expected: str) -> InvalidRequestError:
        line = self._text.count("\n", 0, self._pos) + 1
        column = self._pos - (self._text.rfind("\n", 0, self._pos) + 1) + 1
        got = "the end" if self._peek() == "\0" else repr(self._text[self._pos : self._pos + 20])
        return _invalid(f"line {line}, column {column}: expected {expected}, got {got}")

    def _space(self, newline_ok: bool) -> None:
        while True:
            char = self._peek()
            if char == "#":
                while self._peek() not in "\r\n\0":
                    self._pos += 1
            elif char in " \t" or (newline_ok and char in "\r\n"):
                self._pos += 1
            else:
                return

    def _name(self) -> str:
        start = self._pos
        while _is_word(self._peek()):
            self._pos += 1
        if self._pos == start:
            raise self._fail("a rule name")
        return self._text[start : self._pos]

    def _rule(self) -> None:
        name = self._name()
        self._space(False)
        rule = self._id(name)
        if self._text[self._pos : self._pos + 3] != "::=":
            raise self._fail("'::='")
        self._pos += 3
        self._space(True)
        self._alternates(name, rule, nested=False)
        if self._peek() == "\r":
            self._pos += 2 if self._peek(1) == "\n" else 1
        elif self._peek() == "\n":
            self._pos += 1
        elif self._peek() != "\0":
            raise self._fail("a new line")
        self._space(True)

    def _id(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids))

    def _new_id(self, base: str) -> int:
        """An id for a rule made up here; '_' occurs in no rule's name, so it cannot collide."""
        return self._id(f"{base}_{len(self._ids)}")

    def _define(self, rule: int, elements: list[Element]) -> None:
        self._rules[rule] = elements
        self._count(len(elements))

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > MAX_ELEMENTS:
            raise _invalid(
                f"expected at most {MAX_ELEMENTS} elements after expansion of repetitions, got more"
            )

    def _alternates(self, name: str, rule: int, *, nested: bool) -> None:
        elements: list[Element] = []
        self._sequence(name, elements, nested)
        while self._peek() == "|":
            elements.append((Kind.ALT, 0))
            self._pos += 1
            self._space(True)
            self._sequence(name, elements, nested)
        elements.append((Kind.END, 0))
        self._define(rule, elements)

    def _sequence(self, name: str, elements: list[Element], nested: bool) -> None:
        start = len(elements)  # of the last symbol, what a repetition repeats
        n_prev_rules = 1
        while True:
            char = self._peek()
            if char == '"':
                start, n_prev_rules = len(elements), 1
                self._literal(elements)
            elif char == "[":
                start, n_prev_rules = len(elements), 1
                self._char_class(elements)
            elif char in "<!":
                raise UnsupportedError(
                    "grammar: token references (<...>) are not implemented", what="grammar"
                )
            elif _is_word(char):
                start, n_prev_rules = len(elements), 1
                elements.append((Kind.RULE_REF, self._id(self._name())))
            elif char == "(":
                n_prev_rules = self._group(name, elements)
                start = len(elements) - 1
            elif char == ".":
                start, n_prev_rules = len(elements), 1
                elements.append((Kind.CHAR_ANY, 0))
                self._pos += 1
            elif char in "*+?{":
                low, high = self._times(nested)
                n_prev_rules = self._repeat(name, elements, start, n_prev_rules, low, high)
                continue
            else:
                return
            self._space(nested)

    def _literal(self, elements: list[Element]) -> None:
        self._pos += 1
        while self._peek() != '"':
            elements.append((Kind.CHAR, self._char()))
        self._pos += 1

    def _char_class(self, elements: list[Element]) -> None:
        self._pos += 1
        kind = Kind.CHAR
        if self._peek() == "^":
            kind = Kind.CHAR_NOT
            self._pos += 1
        while self._peek() != "]":
            elements.append((kind, self._char()))
            kind = Kind.CHAR_ALT
            if self._peek() == "-" and self._peek(1) != "]":
                self._pos += 1
                elements.append((Kind.CHAR_RNG_UPPER, self._char()))
        self._pos += 1

    def _char(self) -> int:
        char = self._peek()
        if char == "\0":
            raise self._fail("a closing quote or bracket")
        if char != "\\":
            self._pos += 1
            return ord(char)
        escape = self._peek(1)
        if escape in _HEX_DIGITS:
            n = _HEX_DIGITS[escape]
            digits = self._text[self._pos + 2 : self._pos + 2 + n]
            if len(digits) < n or not set(digits) <= set("0123456789abcdefABCDEF"):
                raise self._fail(f"{n} hexadecimal digits")
            self._pos += 2 + n
            return int(digits, 16)
        if escape not in _ESCAPES:
            raise self._fail("a known escape")
        self._pos += 2
        return ord(_ESCAPES[escape])

    def _group(self, name: str, elements: list[Element]) -> int:
        """A parenthesised group as a rule of its own; how many rules it took."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._fail(f"at most {MAX_NESTING} nested parentheses")
        self._pos += 1
        self._space(True)
        before = len(self._ids)
        rule = self._new_id(name)
        self._alternates(name, rule, nested=True)
        n_rules = max(1, len(self._ids) - before)
        elements.append((Kind.RULE_REF, rule))
        if self._peek() != ")":
            raise self._fail("')'")
        self._pos += 1
        self._depth -= 1
        return n_rules

    def _times(self, nested: bool) -> tuple[int, int | None]:
        """The bounds of a repetition operator; None is no upper bound."""
        char = self._peek()
        self._pos += 1
        self._space(nested)
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        low = self._integer(nested)
        high: int | None = low
        if self._peek() == ",":
            self._pos += 1
            self._space(nested)
            high = (
                self._integer(nested) if self._peek().isascii() and self._peek().isdigit() else None
            )
        if self._peek() != "}":
            raise self._fail("',' or '}'")
        self._pos += 1
        self._space(nested)
        if low > MAX_REPETITIONS:
            raise self._fail(f"at most {MAX_REPETITIONS} repetitions, got {low}")
        if high is not None and high < low:
            raise self._fail(f"repetitions {{m,n}} with m <= n, got {{{low},{high}}}")
        return low, None if high is not None and high > MAX_REPETITIONS else high

    def _integer(self, nested: bool) -> int:
        start = self._pos
        while self._peek() in "0123456789":
            self._pos += 1
        if not 1 <= self._pos - start <= 9:
            raise self._fail("an integer of at most nine digits")
        value = int(self._text[start : self._pos])
        self._space(nested)
        return value

    def _repeat(
        self,
        name: str,
        elements: list[Element],
        start: int,
        n_prev: int,
        low: int,
        high: int | None,
    ) -> int:
        """Rewrites the last symbol S as llama-grammar.cpp does.

        S{m,n} is m times S, then a chain S'(x) ::= S S'(x-1) | of n - m rules; without an upper
        bound, the rule S' ::= S S' |.
        """
        if start == len(elements):
            raise self._fail("something before */+/?/{ to repeat")
        symbol = elements[start:]
        n_rules = (high or low or 1) if high is not None else (low or 1)
        if n_prev * n_rules > MAX_REPETITIONS:
            raise self._fail(f"nested repetitions below {MAX_REPETITIONS} in all")
        n_optional = 1 if high is None else high - low
        self._count(len(symbol) * max(low - 1, 0) + (len(symbol) + 3) * n_optional)
        if low == 0:
            del elements[start:]
        else:
            elements.extend(symbol * (low - 1))
        last = 0
        for i in range(n_optional):
            rule = self._new_id(name)
            follow = rule if high is None else last
            tail = [(Kind.RULE_REF, follow)] if i > 0 or high is None else []
            self._rules[rule] = [*symbol, *tail, (Kind.ALT, 0), (Kind.END, 0)]
            last = rule
        if n_optional:
            elements.append((Kind.RULE_REF, last))
        return n_prev * n_rules


_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}


def _is_word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "-")
