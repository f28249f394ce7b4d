"""The JSON of a tool's call: read piece by piece, with what can be told of it before its end."""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

MAX_DEPTH = 100

_ALPHABET = string.ascii_letters + string.digits
_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789eEtrufalsn")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str  # a JSON object, as it was written
    id: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's form; `index` for a stream's."""
        body = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return body if index is None else {"index": index, **body}


def new_id(*, short: bool = False) -> str:
    """An id for a call; Mistral's templates want nine characters."""
    number = "".join(secrets.choice(_ALPHABET) for _ in range(9 if short else 24))
    return number if short else f"call_{number}"


class _Expects(Enum):
    """What may come next within an object."""

    VALUE = auto()
    VALUE_OR_END = auto()  # of a list that has just begun
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()  # its next character
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()  # a number or a word goes on


class CallScan:
    """{"name": ..., "arguments" or "parameters": {...}}, as far as it was read.

    With a `name` the object is the arguments themselves. `is_call` tells after the end whether it
    is a call's; "name" and its arguments stand in a call once each.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.ended = False
        self.broken = False  # it is no JSON, or not what a call looks like
        self.is_named = name is not None
        self._text = ""
        self._expects = _Expects.VALUE
        self._stack: list[str] = []
        self._is_key = False  # the string that is read
        self._started = 0  # where the string or scalar that is read begins
        self._n_hex = 0
        self._held: int | None = None  # where what could still turn out wrong begins
        self._key: str | None = None  # of the outer object
        self._value = 0  # where that key's value begins
        self._arguments: tuple[int, int | None] | None = None

    def feed(self, text: str) -> int:
        """Reads on; how many characters of `text` belong to the object."""
        before = at = len(self._text)
        self._text += text
        while at < len(self._text) and not (self.ended or self.broken):
            at = self._step(at)
        self._text = self._text[:at]
        return at - before

    @property
    def is_call(self) -> bool:
        """Whether it is a whole call, of whatever function."""
        return self.ended and not self.broken and self.name is not None

    @property
    def arguments_so_far(self) -> str | None:
        """What its arguments begin with, whatever follows; None: nothing is known of them.

        Only of arguments that are an object; they may also be a text that holds one.
        """
        if self._arguments is None or self._text[self._arguments[0]] != "{":
            return None
        start, end = self._arguments
        if end is None:
            end = len(self._text) if self._held is None else self._held
        return self._text[start:end]

    @property
    def arguments(self) -> str | None:
        """A call's arguments, which are a JSON object; None where they are anything else."""
        if self._arguments is None:
            return "{}"
        start, end = self._arguments
        text = self._text[start:end]
        value = _loads(text)
        if isinstance(value, str):
            text, value = value, _loads(value)
        return text if isinstance(value, dict) else None

    def _step(self, at: int) -> int:
        """Reads the character there, or more of a string; where to go on."""
        char = self._text[at]
        expects = self._expects
        if expects is _Expects.STRING:
            plain = _PLAIN.match(self._text, at)
            if plain:
                return plain.end()
            self._string(char, at)
        elif expects is _Expects.ESCAPE or expects is _Expects.HEX:
            self._escape(char)
        elif expects is _Expects.SCALAR:
            if char in _SCALAR_CHARS:
                return at + 1
            self._held = None
            self.broken = not _SCALAR.fullmatch(self._text, self._started, at)
            self._end_value(at)
            return at
        elif char not in _SPACE:
            self._structure(char, at)
        return at + 1

    def _string(self, char: str, at: int) -> None:
        if char == "\\":
            self._expects, self._held = _Expects.ESCAPE, at
        elif char != '"':
            self.broken = True  # a control character
        elif self._is_key:
            if len(self._stack) == 1:
                self._key = _loads(self._text[self._started : at + 1])
            self._expects = _Expects.COLON
        else:
            self._end_value(at + 1)

    def _escape(self, char: str) -> None:
        if self._expects is _Expects.HEX:
            self._n_hex += 1
            self.broken = char not in string.hexdigits
            done = self._n_hex == 4
        else:
            done = char != "u"
            self.broken = char not in '"\\/bfnrtu'
            self._n_hex = 0
        if done:
            self._expects, self._held = _Expects.STRING, None
        else:
            self._expects = _Expects.HEX

    def _structure(self, char: str, at: int) -> None:
        expects = self._expects
        if expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
        elif expects is _Expects.COMMA_OR_END and char == ",":
            self._expects = _Expects.KEY if self._stack[-1] == "{" else _Expects.VALUE
        elif char == "}" and expects in (_Expects.KEY_OR_END, _Expects.COMMA_OR_END):
            self._close("{", at)
        elif char == "]" and expects in (_Expects.VALUE_OR_END, _Expects.COMMA_OR_END):
            self._close("[", at)
        elif expects in (_Expects.KEY, _Expects.KEY_OR_END) and char == '"':
            self._expects, self._is_key, self._started = _Expects.STRING, True, at
        elif expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            self._begin_value(char, at)
        else:
            self.broken = True

    def _begin_value(self, char: str, at: int) -> None:
        if not self._stack:
            self.broken = char != "{"
            if self.is_named:
                self._arguments = at, None
        elif len(self._stack) == 1 and not self.is_named:
            self._value = at
            if self._key in ("arguments", "parameters"):
                self.broken |= self._arguments is not None
                self._arguments = at, None
        if char in "{[":
            self._stack.append(char)
            self.broken |= len(self._stack) > MAX_DEPTH
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
        elif char == '"':
            self._expects, self._is_key, self._started = _Expects.STRING, False, at
        elif char in _SCALAR_CHARS:
            self._expects, self._started, self._held = _Expects.SCALAR, at, at
        else:
            self.broken = True

    def _close(self, opening: str, at: int) -> None:
        if self._stack.pop() != opening:
            self.broken = True
        elif self._stack:
            self._end_value(at + 1)
        else:
            self.ended = True
            if self.is_named:
                self._arguments = 0, at + 1

    def _end_value(self, end: int) -> None:
        self._expects = _Expects.COMMA_OR_END
        if len(self._stack) != 1 or self.is_named or self.broken:
            return
        if self._key in ("arguments", "parameters"):
            self._arguments = self._value, end
        elif self._key == "name":
            value = _loads(self._text[self._value : end])
            self.broken = self.name is not None or not isinstance(value, str)
            self.name = value


def _loads(text: str) -> Any:
    """The value of a JSON text; None for one that is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
