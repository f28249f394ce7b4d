"""Calls of tools in what a model writes, in the formats of Hermes (Qwen), Llama 3 and Mistral.

A parser is fed pieces of text. What may become a call is held back until it is one, and given out
as text should it turn out to be none. Where a stream wants to see calls while they are written, the
parser tells its CallDeltas what it holds back, and at last what became of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from loragraph.server.tool_deltas import CallDelta, CallDeltas
from loragraph.server.tool_json import CallScan, ToolCall, new_id

MAX_HELD = 1 << 20  # characters of one call


@dataclass(slots=True)
class Parsed:
    """What a piece of text amounts to."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    deltas: list[CallDelta] = field(default_factory=list)  # of these calls and of those to come

    def __add__(self, other: Parsed) -> Parsed:
        return Parsed(self.text + other.text, self.calls + other.calls, self.deltas + other.deltas)


class ToolParser(Protocol):
    """Splits one answer into text and calls."""

    def feed(self, piece: str) -> Parsed:
        """What can be told of the text up to here."""

    def flush(self) -> Parsed:
        """What was held back at the end."""


def parser_for(
    template: str, names: frozenset[str], *, forced: bool, deltas: CallDeltas | None = None
) -> ToolParser:
    """The parser for a model, known by its chat template; `names` are the tools of the request.

    `forced`: the answer is a list of calls and nothing else, by its grammar. `deltas`: for a stream
    that wants calls as they are written.
    """
    if forced:
        return JsonCalls(names, deltas)
    if "[TOOL_CALLS]" in template:
        return MistralCalls(names, deltas)
    if "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters"' in template or "<|eom_id|>" in template
    ):
        return LlamaCalls(names, deltas)
    return HermesCalls(names, deltas)


def control_texts(template: str) -> tuple[str, ...]:
    """Control tokens that a template's format marks calls with; the engine leaves them out."""
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
    return tuple(mark for mark in marks if mark in template)


class HermesCalls:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, among text."""

    _open, _close = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str], deltas: CallDeltas | None = None) -> None:
        self._names = names
        self._deltas = deltas
        self._held = ""
        self._inside = False
        self._n_told = 0  # characters of what is held that the deltas know
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
            if self._deltas is not None:
                n = len(body) if mark else len(body) - _overlap(body, self._close)
                out.deltas += self._deltas.feed(body[self._n_told : n])
                self._n_told = max(n, self._n_told)
            if not mark:
                if len(self._held) > MAX_HELD:
                    self._end(out, [], self._open + self._held)
                    self._held = ""
                return out
            self._call(out, body, mark)
            self._held = rest

    def flush(self) -> Parsed:
        """A call whose closing mark is missing, or the text that it is otherwise."""
        out = Parsed()
        if self._inside:
            self._call(out, self._held, "")
        else:
            self._text(out, self._held)
        self._held = ""
        return out

    def _call(self, out: Parsed, body: str, mark: str) -> None:
        self._end(out, _calls(body, self._names), self._open + body + mark)

    def _end(self, out: Parsed, calls: list[ToolCall], text: str) -> None:
        """What was between two marks has come to its end: calls, or else text."""
        self._inside, self._n_told = False, 0
        out.calls += calls
        if self._deltas is not None:
            out.deltas += self._deltas.settle(calls)
        if calls:
            self._after_call = True
        else:
            self._text(out, text)

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
        deltas: CallDeltas | None = None,
    ) -> None:
        """`begins`: True where a text may be calls, None where more of it is needed to tell."""
        self._names = names
        self._begins = begins
        self._parse = parse
        self._deltas = deltas
        self._n_told = 0  # characters of what is held that the deltas know
        self._held = ""
        self._is_text = False

    def feed(self, piece: str) -> Parsed:
        """Nothing, until it is clear that this is text."""
        if self._is_text:
            return Parsed(piece)
        self._held += piece
        begins = self._begins(self._held)
        if begins is False or len(self._held) > MAX_HELD:
            self._is_text = True
            text, self._held = self._held, ""
            return Parsed(text, [], self._settled([]))
        if self._deltas is None or begins is None:
            return Parsed()
        told, self._n_told = self._n_told, len(self._held)
        return Parsed(deltas=self._deltas.feed(self._held[told:]))

    def flush(self) -> Parsed:
        """All calls, or all the text."""
        held, self._held = self._held, ""
        calls = self._parse(held, self._names) if held else []
        return Parsed("" if calls else held, calls, self._settled(calls))

    def _settled(self, calls: list[ToolCall]) -> list[CallDelta]:
        return [] if self._deltas is None else self._deltas.settle(calls)


class LlamaCalls(WholeCalls):
    """{"name": ..., "parameters": {...}} as the whole answer, several with semicolons between."""

    def __init__(self, names: frozenset[str], deltas: CallDeltas | None = None) -> None:
        super().__init__(names, _begins_llama, _llama_calls, deltas)


class JsonCalls(WholeCalls):
    """[{"name": ..., "arguments": {...}}] as the whole answer, by a grammar."""

    def __init__(self, names: frozenset[str], deltas: CallDeltas | None = None) -> None:
        super().__init__(names, lambda _text: True, _calls, deltas)


class MistralCalls:
    """Text, then [TOOL_CALLS] and a list of calls, or [TOOL_CALLS]name[ARGS]{...}."""

    _mark = "[TOOL_CALLS]"

    def __init__(self, names: frozenset[str], deltas: CallDeltas | None = None) -> None:
        self._names = names
        self._deltas = deltas
        self._held = ""
        self._inside = False

    def feed(self, piece: str) -> Parsed:
        """Text before the mark."""
        self._held += piece
        if self._inside:
            return Parsed(deltas=self._told(piece))
        before, mark, rest = self._held.partition(self._mark)
        if mark:
            self._inside, self._held = True, rest
            return Parsed(before, deltas=self._told(rest))
        cut = len(self._held) - _overlap(self._held, self._mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return Parsed(text)

    def flush(self) -> Parsed:
        """All calls."""
        held, self._held = self._held, ""
        if not self._inside:
            return Parsed(held)
        calls = self._calls(held)
        deltas = [] if self._deltas is None else self._deltas.settle(calls)
        return Parsed("" if calls else self._mark + held, calls, deltas)

    def _calls(self, held: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for part in held.split(self._mark):
            found = _calls(part, self._names, short_ids=True) or _named(part, self._names)
            if not found:
                return []
            calls += found
        return calls

    def _told(self, text: str) -> list[CallDelta]:
        return [] if self._deltas is None else self._deltas.feed(text, short_ids=True)


def _begins_llama(text: str) -> bool | None:
    text = text.lstrip()
    if not text:
        return None
    tag = "<|python_tag|>"
    if text.startswith(tag[: len(text)]):
        return True if len(text) >= len(tag) else None
    return text.startswith("{")


def _llama_calls(text: str, names: frozenset[str]) -> list[ToolCall]:
    return _calls(text.strip().removeprefix("<|python_tag|>"), names)


def _calls(text: str, names: frozenset[str], *, short_ids: bool = False) -> list[ToolCall]:
    """The calls of a JSON text: an object, a list, or several with semicolons; all or none."""
    calls = []
    for part in _objects(text.strip()):
        scan = CallScan()
        scan.feed(part)
        call = _call(scan, names, short_ids)
        if call is None:
            return []
        calls.append(call)
    return calls


def _objects(text: str) -> list[str]:
    """The texts of the values in a JSON text: those of lists, and others; none for another text."""
    decoder = json.JSONDecoder()
    found: list[str] = []
    at, in_list = 0, False
    try:
        while at < len(text):
            if not in_list and text[at] == "[":
                in_list, at = True, _blank(text, at + 1)
                if text[at : at + 1] == "]":
                    in_list, at = False, _separated(text, at + 1)
                continue
            _, end = decoder.raw_decode(text, at)
            found.append(text[at:end])
            at = _blank(text, end)
            if not in_list:
                at = _separated(text, at)
            elif text[at : at + 1] == ",":
                at = _blank(text, at + 1)
            elif text[at : at + 1] == "]":
                in_list, at = False, _separated(text, at + 1)
            else:
                return []
    except (ValueError, RecursionError):
        return []
    return [] if in_list else found


def _blank(text: str, at: int) -> int:
    """The next place that is not blank."""
    return len(text) - len(text[at:].lstrip())


def _separated(text: str, at: int) -> int:
    """The next value's place, behind a semicolon if there is one."""
    at = _blank(text, at)
    return _blank(text, at + 1) if text[at : at + 1] == ";" else at


def _named(text: str, names: frozenset[str]) -> list[ToolCall]:
    """name[ARGS]{...}, or name{...}."""
    name, brace, rest = text.partition("{")
    scan = CallScan(name.strip().removesuffix("[ARGS]").strip())
    body = (brace + rest).rstrip()
    if scan.feed(body) < len(body):
        return []
    call = _call(scan, names, short_ids=True)
    return [] if call is None else [call]


def _call(scan: CallScan, names: frozenset[str], short_ids: bool) -> ToolCall | None:
    arguments = scan.arguments if scan.is_call else None
    if scan.name is None or scan.name not in names or arguments is None:
        return None
    return ToolCall(scan.name, arguments, new_id(short=short_ids))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:n]):
            return n
    return 0
