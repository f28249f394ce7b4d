"""Schemas that are wrong or hostile: refused, and before they cost much."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loragraph.engine.gbnf import parse_grammar
from loragraph.errors import InvalidRequestError
from loragraph.server.forms import cached_grammar
from loragraph.server.json_keywords import ANNOTATIONS, BY_TYPE
from loragraph.server.json_pattern import pattern_rule
from loragraph.server.json_schema import MAX_GRAMMAR, grammar_of_schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": float("nan")},
        {"type": "integer", "exclusiveMaximum": float("-inf")},
        {"const": float("nan")},
        {"enum": [1, [float("inf")]]},
        {"type": "integer", "exclusiveMinimum": "x"},
        {"type": "integer", "exclusiveMinimum": [1]},
        {"type": "integer", "exclusiveMaximum": "1"},
        {"type": "integer", "exclusiveMaximum": True},
        {"type": "integer", "exclusiveMinimum": 1, "minimum": "0"},
        {"type": "integer", "minimum": 10**400},
        {"const": 1, "enum": 5},
        {"const": 1, "enum": [True]},
        {"anyOf": [{"$ref": "#/anyOf/" + "1" * 5000}]},
        {"anyOf": [{"$ref": "#/anyOf/" + "1" * 900}]},
        {"anyOf": [{"$ref": "#/anyOf/²"}]},
        {"$defs": {"a": {"type": "null"}}, "$ref": "#" + "/$defs" * 1000},
    ],
)
def test_wrong_types_and_numbers_that_were_internal_errors(schema: Any) -> None:
    """NaN, bounds that are no numbers, an enum that is no list, indices of thousands of digits."""
    with pytest.raises(InvalidRequestError):
        cached_grammar(schema)


_KEYWORDS = sorted({*ANNOTATIONS, *(key for keys in BY_TYPE.values() for key in keys), "if"})
_COMBINING = ["type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf", "properties", "items"]
_REFS = ["#", "#/", "#/anyOf/0", "#/allOf/1", "#/properties/a", "#/%7E", "#/anyOf/-1", "x"]
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2001, 10**20, -(10**400), 1e308, 0.5, float("inf"), float("nan")]),
    st.sampled_from([*BY_TYPE, *_REFS, "a", "", "date", "(a|b$)*", "^[^a]{2,}", "\x00", "\ud800"]),
)
_keys = st.sampled_from([*_COMBINING * 3, *_KEYWORDS, "a", "0", "~"])
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(_keys, inner, max_size=4),
        # a keyword with a value that it may have, so that the walk gets beyond it
        st.builds(lambda part: {"type": "object", "properties": {"a": part}}, inner),
        st.builds(lambda part, key: {key: [part, {}]}, inner, st.sampled_from(_COMBINING[4:7])),
        st.builds(lambda kind, part: {"type": kind, **part}, st.sampled_from(sorted(BY_TYPE)),
                  st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=2)),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(_values)
@example({"allOf": [{"enum": [1]}, {"const": [{}]}]})
def test_any_value_as_a_schema_is_a_grammar_or_refused(schema: Any) -> None:
    """Keywords with values of any type: nothing but InvalidRequestError comes out."""
    for convert in (cached_grammar, grammar_of_schema):
        try:
            text = convert(schema)
        except InvalidRequestError:
            continue
        with suppress(InvalidRequestError):  # too large once repetitions are written out
            assert parse_grammar(text).names


def _is_refused_early(schema: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many patterns were read until a schema was refused as too much."""
    n_read = 0

    def counted(*args: Any) -> str:
        nonlocal n_read
        n_read += 1
        return pattern_rule(*args)

    monkeypatch.setattr("loragraph.server.json_schema.pattern_rule", counted)
    with pytest.raises(InvalidRequestError, match="grammar and patterns take more than"):
        grammar_of_schema(schema)
    return n_read


@pytest.mark.parametrize("pattern", ["[^a]" * 250, "[" + "a" * 998 + "]", "x" * 1000])
def test_long_patterns_are_refused_before_all_are_read(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MB of them took a minute and 240 MB: what a grammar may hold was checked at its end."""
    members = {f"p{i}": {"type": "string", "pattern": pattern} for i in range(1900)}
    n_read = _is_refused_early({"type": "object", "properties": members}, monkeypatch)
    assert n_read <= MAX_GRAMMAR // 1000


def test_a_character_class_is_written_once() -> None:
    """`[^a]` in a JSON string takes 500 characters of grammar; 250 of them took 120,000."""
    once = len(grammar_of_schema({"type": "string", "pattern": "^[^a]$"}))
    often = len(grammar_of_schema({"type": "string", "pattern": f"^{'[^a]' * 240}$"}))
    assert often < once + 240 * 4


@pytest.mark.parametrize(("n_members", "words"), [(1, "parts"), (900, "values to lay together")])
def test_laying_schemas_together_is_bounded(n_members: int, words: str) -> None:
    """A list of references to two equal schemas compares them once for each."""
    part = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(n_members)}}
    refs = [{"$ref": f"#/$defs/{'ab'[i % 2]}"} for i in range(1000)]
    schema = {"$defs": {"a": part, "b": json.loads(json.dumps(part))}}
    with pytest.raises(InvalidRequestError, match=words):
        grammar_of_schema({**schema, "anyOf": [{"allOf": refs}, {"allOf": refs}]})


def _at_length(schema: dict[str, Any], n: int) -> dict[str, Any]:
    """A schema that many unlike references refer to: `~` of a name may be written in two ways."""
    name = "~" * 12
    spellings = [f"{i:012b}".replace("0", "~0").replace("1", "%7E0") for i in range(n)]
    return {"$defs": {name: schema}, "anyOf": [{"$ref": f"#/$defs/{one}"} for one in spellings]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": [f"p{i}" for i in range(50_000)]},
        _at_length({"type": "object", "required": ["a"] * 50_000}, 900),
        _at_length({"type": ["null"] * 50_000}, 900),
        {"allOf": [{"required": [f"p{i}" for i in range(50_000)]}, *[{"required": ["a"]}] * 900]},
        {"anyOf": [{"title": "a"}] * 900, "type": ["null"] * 50_000},
    ],
    ids=["required", "required often", "types often", "required merged", "types merged"],
)
def test_long_lists_are_refused_before_they_are_walked_often(schema: Any) -> None:
    """Each of them took from 4 s to more than 13 s: lists copied for each name or reference."""
    with pytest.raises(InvalidRequestError, match=r"required: expected|of object, array|together"):
        grammar_of_schema(schema)


def test_a_chain_of_deep_references_is_resolved_once() -> None:
    """As many parts as there may be, each with forty references of 150 steps."""
    depth, n_hops = 150, 40
    path = "#/$defs" + "/a" * depth
    inner: Any = {str(i): {"$ref": f"{path}/{i + 1}"} for i in range(n_hops)}
    inner[str(n_hops)] = {"type": "null"}
    for _ in range(depth):
        inner = {"a": inner}
    parts = [{"$ref": f"{path}/0"}] * 990
    assert "null" in grammar_of_schema({"$defs": inner, "allOf": parts})
