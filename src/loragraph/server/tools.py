"""Calls of tools in what a model writes, in the formats of Hermes (Qwen), Llama 3 and Mistral.

A parser is fed pieces of text. What may become a call is held back until it is one, and given out
as text should it turn out to be none; so a client never sees half a call.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_HELD = 1 << 20  # characters of one call

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str  # JSON
    id: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's form; `index` for a stream's."""
        body = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return body if index is None else {"index": index, **body}


@dataclass(slots=True)
class Parsed:
    """What a piece of text amounts to."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(Protocol):
    """Splits one answer into text and calls."""

    def feed(self, piece: str) -> Parsed:
        """What can be told of the text up to here."""

    def flush(self) -> Parsed:
        """What was held back at the end."""


def parser_for(template: str, names: frozenset[str], *, forced: bool) -> ToolParser:
    """The parser for a model, known by its chat template; `names` are the tools of the request.

    `forced`: the answer is a list of calls and nothing else, by its grammar.
    """
    if forced:
        return JsonCalls(names)
    if "[TOOL_CALLS]" in template:
        return MistralCalls(names)
    if "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters"' in template or "<|eom_id|>" in template
    ):
        return LlamaCalls(names)
    return HermesCalls(names)


def control_texts(template: str) -> tuple[str, ...]:
    """Control tokens that a template's format marks calls with; the engine leaves them out."""
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
    return tuple(mark for mark in marks if mark in template)


class HermesCalls:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, among text."""

    _open, _close = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._inside = False
        self._after_call = False

    def feed(self, piece: str) -> Parsed:
        """Text outside of marks, and whole calls."""
        self._held += piece
        out = Parsed()
        while True:
            if not self._inside:
                before, mark, rest = self._held.partition(self._open)
                if not mark:
                    keep = _overlap(self._held, self._open)
                    cut = len(self._held) - keep
                    self._text(out, self._held[:cut])
                    self._held = self._held[cut:]
                    return out
                self._text(out, before)
                self._held, self._inside = rest, True
            body, mark, rest = self._held.partition(self._close)
            if not mark:
                if len(self._held) > MAX_HELD:
                    self._text(out, self._open + self._held)
                    self._held, self._inside = "", False
                return out
            self._call(out, body, mark)
            self._held, self._inside = rest, False

    def flush(self) -> Parsed:
        """A call whose closing mark is missing, or the text that it is otherwise."""
        out = Parsed()
        if self._inside:
            self._call(out, self._held, "")
        else:
            self._text(out, self._held)
        self._held, self._inside = "", False
        return out

    def _call(self, out: Parsed, body: str, mark: str) -> None:
        calls = list(_calls(body, self._names))
        if calls:
            out.calls += calls
            self._after_call = True
        else:
            self._text(out, self._open + body + mark)

    def _text(self, out: Parsed, text: str) -> None:
        if self._after_call:  # line breaks between calls are no answer
            text = text.lstrip()
            self._after_call = not text
        out.text += text


class WholeCalls:
    """An answer that is calls altogether or text altogether, which its beginning decides."""

    def __init__(
        self,
        names: frozenset[str],
        begins: Callable[[str], bool | None],
        parse: Callable[[str, frozenset[str]], list[ToolCall]],
    ) -> None:
        """`begins`: True where a text may be calls, None where more of it is needed to tell."""
        self._names = names
        self._begins = begins
        self._parse = parse
        self._held = ""
        self._is_text = False

    def feed(self, piece: str) -> Parsed:
        """Nothing, until it is clear that this is text."""
        if self._is_text:
            return Parsed(piece)
        self._held += piece
        if self._begins(self._held) is False or len(self._held) > MAX_HELD:
            self._is_text = True
            text, self._held = self._held, ""
            return Parsed(text)
        return Parsed()

    def flush(self) -> Parsed:
        """All calls, or all the text."""
        held, self._held = self._held, ""
        calls = self._parse(held, self._names) if held else []
        return Parsed("", calls) if calls else Parsed(held)


class LlamaCalls(WholeCalls):
    """{"name": ..., "parameters": {...}} as the whole answer, several with semicolons between."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names, _begins_llama, _llama_calls)


class JsonCalls(WholeCalls):
    """[{"name": ..., "arguments": {...}}] as the whole answer, by a grammar."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names, lambda _text: True, lambda text, names: list(_calls(text, names)))


class MistralCalls:
    """Text, then [TOOL_CALLS] and a list of calls, or [TOOL_CALLS]name[ARGS]{...}."""

    _mark = "[TOOL_CALLS]"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._inside = False

    def feed(self, piece: str) -> Parsed:
        """Text before the mark."""
        self._held += piece
        if self._inside:
            return Parsed()
        before, mark, rest = self._held.partition(self._mark)
        if mark:
            self._inside, self._held = True, rest
            return Parsed(before)
        cut = len(self._held) - _overlap(self._held, self._mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return Parsed(text)

    def flush(self) -> Parsed:
        """All calls."""
        held, self._held = self._held, ""
        if not self._inside:
            return Parsed(held)
        calls: list[ToolCall] = []
        for part in held.split(self._mark):
            found = list(_calls(part, self._names, short_ids=True)) or _named(part, self._names)
            if not found:
                return Parsed(self._mark + held)
            calls += found
        return Parsed("", calls)


def _begins_llama(text: str) -> bool | None:
    text = text.lstrip()
    if not text:
        return None
    tag = "<|python_tag|>"
    if text.startswith(tag[: len(text)]):
        return True if len(text) >= len(tag) else None
    return text.startswith("{")


def _llama_calls(text: str, names: frozenset[str]) -> list[ToolCall]:
    return list(_calls(text.strip().removeprefix("<|python_tag|>"), names))


def _calls(text: str, names: frozenset[str], *, short_ids: bool = False) -> Iterator[ToolCall]:
    """The calls of a JSON text: an object, a list, or several with semicolons; all or none."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return
        found += value if isinstance(value, list) else [value]
        text = text[end:].lstrip().removeprefix(";").lstrip()
    calls = []
    for value in found:
        call = _call(value, names, short_ids)
        if call is None:
            return
        calls.append(call)
    yield from calls


def _named(text: str, names: frozenset[str]) -> list[ToolCall]:
    """name[ARGS]{...}, or name{...}."""
    name, _, rest = text.partition("[ARGS]") if "[ARGS]" in text else text.partition("{")
    body = rest if "[ARGS]" in text else "{" + rest
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):
        return []
    call = _call({"name": name.strip(), "arguments": arguments}, names, short_ids=True)
    return [] if call is None else [call]


def _call(value: Any, names: frozenset[str], short_ids: bool) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if name not in names or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    n = 9 if short_ids else 24  # Mistral's templates want nine characters
    number = "".join(secrets.choice(_ALPHABET) for _ in range(n))
    return ToolCall(name, text, number if short_ids else f"call_{number}")


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:n]):
            return n
    return 0
