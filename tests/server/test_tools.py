"""Calls of tools in what models write."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.server.tools import (
    HermesCalls,
    JsonCalls,
    LlamaCalls,
    MistralCalls,
    Parsed,
    ToolParser,
    control_texts,
    parser_for,
)

NAMES = frozenset({"add", "get-time"})
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x}"]}}'
TIME = '{"name": "get-time", "arguments": {}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"arguments"')

Maker = Callable[[frozenset[str]], ToolParser]

CASES: list[tuple[Maker, str, str, list[str]]] = [
    (HermesCalls, "Hello <b>you</b>", "Hello <b>you</b>", []),
    (HermesCalls, f"<tool_call>\n{ADD}\n</tool_call>", "", ["add"]),
    (HermesCalls, f"Sure. <tool_call>{ADD}</tool_call>", "Sure. ", ["add"]),
    (
        HermesCalls,
        f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>",
        "",
        ["add", "get-time"],
    ),
    (HermesCalls, f"<tool_call>{ADD}", "", ["add"]),  # cut off before its closing mark
    (HermesCalls, '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    (HermesCalls, "<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
    (HermesCalls, "a < b and <tool", "a < b and <tool", []),
    (HermesCalls, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    (LlamaCalls, "It is noon.", "It is noon.", []),
    (LlamaCalls, LLAMA, "", ["add"]),
    (LlamaCalls, f"<|python_tag|>{LLAMA}; {LLAMA}", "", ["add", "add"]),
    (LlamaCalls, '{"answer": 42}', '{"answer": 42}', []),
    (LlamaCalls, '{"name": "add", ', '{"name": "add", ', []),
    (LlamaCalls, "<|pyth", "<|pyth", []),
    (MistralCalls, "Bonjour", "Bonjour", []),
    (MistralCalls, f"[TOOL_CALLS] [{ADD}, {TIME}]", "", ["add", "get-time"]),
    (MistralCalls, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", ["add"]),
    (MistralCalls, '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get-time{}', "", ["add", "get-time"]),
    (MistralCalls, "[TOOL_CALLS] [{", "[TOOL_CALLS] [{", []),
    (MistralCalls, "an [TOOL", "an [TOOL", []),
    (JsonCalls, f" [{ADD}]", "", ["add"]),
    (JsonCalls, f"[{ADD},", f"[{ADD},", []),
]  # fmt: skip


def split_at(text: str, cuts: set[int]) -> list[str]:
    """The pieces of a text between cuts."""
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def parse(parser: ToolParser, pieces: list[str]) -> tuple[list[str], Parsed]:
    """What was given out while it came, and all of it together."""
    parts = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    whole = Parsed("".join(p.text for p in parts), [call for p in parts for call in p.calls])
    return [part.text for part in parts[:-1]], whole


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(1, 120)))
@pytest.mark.parametrize(("maker", "text", "left", "names"), CASES)
def test_any_way_of_cutting_gives_the_same(
    maker: Maker, text: str, left: str, names: list[str], cuts: set[int]
) -> None:
    """However a text comes, text and calls are told apart alike, and no half call is given out."""
    shown, whole = parse(maker(NAMES), split_at(text, cuts))

    assert whole.text == left
    assert [call.name for call in whole.calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
    if names:
        assert not any(mark in "".join(shown) for mark in MARKS)


def test_arguments_and_ids() -> None:
    """Arguments are JSON of what was written; ids differ; Mistral's are short."""
    _, hermes = parse(HermesCalls(NAMES), [f"<tool_call>{ADD}</tool_call>" * 2])
    _, mistral = parse(MistralCalls(NAMES), [f"[TOOL_CALLS][{ADD}]"])

    assert json.loads(hermes.calls[0].arguments) == {"a": 1, "b": [2, "x}"]}
    assert hermes.calls[0].id != hermes.calls[1].id
    assert len(mistral.calls[0].id) == 9
    assert hermes.calls[1].to_json(3)["index"] == 3


def test_a_call_that_never_ends_is_text() -> None:
    """What is held back is bounded."""
    parser = HermesCalls(NAMES)

    parsed = [parser.feed("<tool_call>")] + [parser.feed("x" * (1 << 19)) for _ in range(3)]

    assert sum(len(one.text) for one in parsed) > 1 << 20


@pytest.mark.parametrize(
    ("template", "forced", "kind"),
    [
        ("{{ tools }}<tool_call>", False, HermesCalls),
        ("{{ tools }}[TOOL_CALLS]", False, MistralCalls),
        ("{{ tools }}<|python_tag|>", False, LlamaCalls),
        ("{{ tools }}", False, HermesCalls),
        ("{{ tools }}[TOOL_CALLS]", True, JsonCalls),
    ],
)
def test_the_template_tells_the_format(template: str, forced: bool, kind: type) -> None:
    """A model's format is known by its chat template; a forced call is a list by its grammar."""
    assert type(parser_for(template, NAMES, forced=forced)) is kind
    assert all(mark in template for mark in control_texts(template))
