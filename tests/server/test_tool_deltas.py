"""Calls in a stream, while they are written: what is given out is what the whole answer has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.server.tool_deltas import CallDelta, CallDeltas
from loragraph.server.tool_json import MAX_DEPTH, CallScan
from loragraph.server.tools import HermesCalls, JsonCalls, LlamaCalls, MistralCalls, Parsed
from tests.server.test_tools import ADD, CASES, LLAMA, NAMES, TIME, Maker, split_at

LONG = '{"name": "add", "arguments": {"code": "a\\n\\u00e9\\\\ {[", "n": [-1.5e3, true, null]}}'


def stream(maker: Any, pieces: list[str], n_most: int | None = None) -> list[Parsed]:
    """What a parser for streams tells of each piece, and of the end."""
    parser = maker(NAMES, CallDeltas(NAMES, n_most))
    return [*(parser.feed(piece) for piece in pieces), parser.flush()]


def joined(deltas: list[CallDelta]) -> list[tuple[str | None, str]]:
    """Calls as clients put them together."""
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        assert (delta.id is None) == (delta.index in calls)
        assert (delta.id is None) == (delta.name is None)
        calls.setdefault(delta.index, [delta.name, ""])[1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    return [(name, arguments) for name, arguments in calls.values()]


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(1, 120)))
@pytest.mark.parametrize(("maker", "text", "left", "names"), CASES)
def test_deltas_add_up_to_the_whole_calls(
    maker: Maker, text: str, left: str, names: list[str], cuts: set[int]
) -> None:
    """However a text comes, and whatever else is in it."""
    whole = sum(stream(maker, split_at(text, cuts)), Parsed())

    assert whole.text == left
    assert [call.name for call in whole.calls] == names
    if names:
        assert joined(whole.deltas) == [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize(
    ("maker", "text"),
    [
        (HermesCalls, f"<tool_call>{LONG}</tool_call>"),
        (LlamaCalls, LONG.replace("arguments", "parameters")),
        (MistralCalls, f"[TOOL_CALLS][{LONG}]"),
        (MistralCalls, f"[TOOL_CALLS]add[ARGS]{json.dumps(json.loads(LONG)['arguments'])}"),
        (JsonCalls, f"[{LONG}]"),
    ],
)
def test_arguments_come_as_they_are_written(maker: Any, text: str) -> None:
    """Character by character: first the name, then all that is sure of the arguments."""
    parts = stream(maker, list(text))

    deltas = [delta for part in parts for delta in part.deltas]
    assert (deltas[0].name, deltas[0].arguments) == ("add", "")
    assert len(deltas) > 20  # an escape or a number comes as a whole
    calls = [call for part in parts for call in part.calls]
    assert joined(deltas) == [("add", calls[0].arguments)]
    assert json.loads(calls[0].arguments) == json.loads(LONG)["arguments"]
    n_late = sum(len(delta.arguments) for delta in parts[-1].deltas)
    assert n_late == 0  # nothing was left for the end


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "rm", "arguments": {"a": 1}}',  # an unknown function
        '{"arguments": {"a": 1}, "name": "rm"}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": 5}',
        '{"name": 7, "arguments": {}}',
        '{"name": "add", arguments: {}}',
        "{'name': 'add'}",
        '{"name": "add", "name": "add", "arguments": {}}',
        "x",
        "",
        "[",
        "[[]]",
    ],
)
def test_nothing_is_begun_of_what_can_be_no_call(body: str) -> None:
    """It is text, as in a whole answer."""
    text = f"<tool_call>{body}</tool_call>"
    whole = sum(stream(HermesCalls, list(text)), Parsed())

    assert whole.deltas == []
    assert whole.text == text


@pytest.mark.parametrize(
    ("end", "sent"),
    [
        ("", '{"a": [1, '),
        ("}", '{"a": [1, '),  # no bracket closes here
        ("tru3]}}", '{"a": [1, '),
        ("01]}}", '{"a": [1, '),
        ('"\\x"]}}', '{"a": [1, "'),
        ('2]}, "name": "get-time"}', '{"a": [1, 2]}'),
        ('2]}, "parameters": {}}', '{"a": [1, 2]}'),
        ("NaN]}}", '{"a": [1, '),
    ],
)
def test_a_call_that_breaks_off_is_text(end: str, sent: str) -> None:
    """What was sent of it stays a beginning of JSON; its whole text follows, and it is no call."""
    text = '<tool_call>{"name": "add", "arguments": {"a": [1, ' + end
    whole = sum(stream(HermesCalls, list(text)), Parsed())

    assert joined(whole.deltas) == [("add", sent)]
    assert whole.text == text
    assert whole.calls == []


def test_an_index_is_used_once() -> None:
    """A call after one that broke off has an index of its own."""
    broken = '<tool_call>{"name": "add", "arguments": {"a": }</tool_call>'
    parts = stream(HermesCalls, [*broken, f"<tool_call>{TIME}</tool_call>"])
    whole = sum(parts, Parsed())

    assert [(delta.index, delta.name) for delta in whole.deltas if delta.id] == [
        (0, "add"),
        (1, "get-time"),
    ]
    assert [call.name for call in whole.calls] == ["get-time"]


@pytest.mark.parametrize(
    ("maker", "text"),
    [
        (HermesCalls, f"<tool_call>{ADD}</tool_call><tool_call>{TIME}</tool_call>"),
        (HermesCalls, f"<tool_call>[{ADD},{TIME}]</tool_call>"),
        (LlamaCalls, f"{LLAMA};{LLAMA}"),
        (JsonCalls, f"[{ADD},{TIME}]"),
    ],
)
def test_no_more_calls_than_are_wanted(maker: Any, text: str) -> None:
    """The second is not given out, neither as it is written nor at the end."""
    for pieces in ([text], list(text)):
        whole = sum(stream(maker, pieces, 1), Parsed())
        assert [name for name, _ in joined(whole.deltas)] == ["add"]
        assert len(whole.calls) == 2


def test_arguments_in_a_text() -> None:
    """Some models write the object as a string: it is given out once it is whole."""
    body = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    whole = sum(stream(HermesCalls, list(f"<tool_call>{body}</tool_call>")), Parsed())

    assert joined(whole.deltas) == [("add", '{"a": 1}')]
    assert [call.arguments for call in whole.calls] == ['{"a": 1}']


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans(), st.booleans())
def test_a_scan_reads_what_json_reads(arguments: Any, ascii: bool, spaced: bool) -> None:
    """Every object, in every form; and at each place what is known is a beginning of it."""
    separators = (", ", ": ") if spaced else (",", ":")
    text = json.dumps(arguments, ensure_ascii=ascii, separators=separators)
    scan = CallScan("f")
    for char in text:
        assert scan.feed(char) == 1
        known = scan.arguments_so_far
        assert known is not None
        assert text.startswith(known)

    assert scan.is_call
    assert scan.arguments == text


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet='{}[]",:\\ \n0-1.eEtrufalsn\x01', max_size=14))
def test_a_scan_refuses_what_json_refuses(tail: str) -> None:
    """Whatever it calls an object, json does too, and the other way round."""
    text = "{" + tail
    scan = CallScan("f")
    n = scan.feed(text)

    if scan.ended:
        assert isinstance(json.loads(text[:n]), dict)
    else:
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(text)


def test_depth_is_bounded() -> None:
    """Deeper arguments are no call, whoever asks."""
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}}}}}</tool_call>'
    whole = sum(stream(HermesCalls, [text]), Parsed())

    assert whole.calls == []
    assert whole.text == text
