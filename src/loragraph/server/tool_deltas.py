"""Calls that are still being written, for streams: their names, and arguments as they come.

What is given out of a call is what its arguments begin with, whatever follows. Whether it becomes a
call at all only its end tells, and then the parser does: `settle` adds what is left of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loragraph.server.tool_json import CallScan, ToolCall, new_id

_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_BETWEEN = " \t\n\r[],;"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a call. Its first one has its id and its name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"arguments": self.arguments}
        if self.id is None:
            return {"index": self.index, "function": function}
        function = {"name": self.name or "", **function}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _Group:
    """What is known of the calls that come together."""

    lead: str = ""  # what stands before the next object
    scan: CallScan | None = None
    was_named: bool = False  # the last object was arguments behind a name
    n_scanned: int = 0
    sent: list[str] = field(default_factory=list)  # the arguments of each call that was begun
    blind: bool = False  # only the parser can tell what this is


class CallDeltas:
    """Of one answer. `feed` gets the text that is held back as what may be calls.

    Several groups of calls may come, each ended by `settle`. A call that was begun and turned out
    to be none keeps its index: nothing more comes of it.
    """

    def __init__(self, names: frozenset[str], n_most: int | None = None) -> None:
        """`n_most`: of calls that are given out; None: all."""
        self._names = names
        self._n_most = n_most
        self._n_good = 0  # calls that were settled
        self._next = 0  # the first index of the group
        self._group = _Group()

    def feed(self, text: str, *, short_ids: bool = False) -> list[CallDelta]:
        """What more of the group's text tells; `short_ids`: in Mistral's format."""
        out: list[CallDelta] = []
        group = self._group
        while text and not group.blind:
            if group.scan is None:
                before, brace, rest = text.partition("{")
                group.lead += before
                if not brace:
                    break
                text = brace + rest
                self._begin(short_ids)
                continue
            text = text[group.scan.feed(text) :]
            self._tell(group.scan, out, short_ids)
            if group.scan.ended:
                group.blind |= len(group.sent) <= group.n_scanned  # it was not begun
                group.n_scanned += 1
                group.was_named, group.scan = group.scan.is_named, None
        return out

    def settle(self, calls: Sequence[ToolCall]) -> list[CallDelta]:
        """Ends the group: what its calls have that was not given out. None: it is text."""
        out, group = [], self._group
        for i, call in enumerate(calls[: self._n_left]):
            if i >= len(group.sent):
                out.append(CallDelta(self._next + i, call.arguments, call.id, call.name))
                continue
            sent = group.sent[i]
            assert call.arguments.startswith(sent)
            if call.arguments != sent:
                out.append(CallDelta(self._next + i, call.arguments[len(sent) :]))
        self._n_good += len(calls)
        self._next += max(len(group.sent), len(calls))
        self._group = _Group()
        return out

    @property
    def _n_left(self) -> int | None:
        return None if self._n_most is None else max(0, self._n_most - self._n_good)

    def _begin(self, short_ids: bool) -> None:
        """An object begins, behind the lead."""
        group = self._group
        lead, group.lead = group.lead, ""
        marked = "[TOOL_CALLS]" in lead
        for mark in _MARKS:
            lead = lead.replace(mark, "")
        name = lead.strip().removesuffix("[ARGS]").strip(_BETWEEN) if short_ids else ""
        if name:
            group.blind = name not in self._names or (group.n_scanned > 0 and not marked)
            group.scan = CallScan(name)
        else:
            group.blind = bool(lead.strip(_BETWEEN)) or (group.was_named and not marked)
            group.scan = CallScan()

    def _tell(self, scan: CallScan, out: list[CallDelta], short_ids: bool) -> None:
        """What is known of the object that is read."""
        group = self._group
        at = group.n_scanned
        so_far = scan.arguments_so_far
        if scan.broken or (scan.name is not None and scan.name not in self._names):
            group.blind = True
        elif scan.name is not None and so_far is not None:
            if self._n_left is not None and at >= self._n_left:
                return
            if at == len(group.sent):
                out.append(CallDelta(self._next + at, "", new_id(short=short_ids), scan.name))
                group.sent.append("")
            more = so_far[len(group.sent[at]) :]
            if more:
                out.append(CallDelta(self._next + at, more))
                group.sent[at] = so_far
