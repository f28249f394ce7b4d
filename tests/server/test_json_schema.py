"""Schemas to grammars. Oracle: the package jsonschema validates what the grammars allow."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.engine.gbnf import parse_grammar
from loragraph.errors import InvalidRequestError
from loragraph.server.json_schema import grammar_of_schema
from tests.server.languages import Language


def language(schema: Any) -> Language:
    """The texts that a schema's grammar allows."""
    return Language(grammar_of_schema(schema))


_leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": '^[a-c"\\\\]{1,3}(x|y)?$'},
        {"type": "string", "format": "date"},
        {"type": "integer"},
        {"type": "integer", "minimum": -7, "maximum": 123},
        {"type": "integer", "exclusiveMinimum": 99},
        {"type": "number"},
        {"type": "number", "minimum": 0},
        {"type": "boolean"},
        {"type": "null"},
        {"const": {"a": [1, '\n"']}},
        {"enum": ["x", 2, None, "é"]},
        {"type": ["string", "null"]},
        {"type": "object"},
        {},
        {"$ref": "#/$defs/tree"},
    ]
)
_names = st.sampled_from(["a", "b", "c d", 'q"', "\\n", "é"])
_TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["next"],
}


def _branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def members(properties: dict[str, Any], chosen: set[str], extra: Any) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": properties,
            "required": sorted(chosen & set(properties)),
        }
        return schema if extra is None else schema | {"additionalProperties": extra}

    return st.one_of(
        st.builds(
            members,
            st.dictionaries(_names, inner, max_size=4),
            st.sets(_names),
            st.sampled_from([None, True, False]),
        ),
        st.builds(lambda item: {"type": "object", "additionalProperties": item}, inner),
        st.builds(
            lambda item, low, more: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "minItems": len(items)},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    )


_schemas = st.recursive(_leaves, _branches, max_leaves=6)


@settings(deadline=None, max_examples=60)
@given(_schemas, st.integers(0, 2**32))
def test_whatever_a_grammar_allows_is_valid(schema: Any, seed: int) -> None:
    """Texts drawn from a schema's grammar are JSON, and valid by the schema."""
    schema = {"$defs": {"tree": _TREE}, "allOf": [schema]} if "$ref" in str(schema) else schema
    rng = random.Random(seed)
    texts = language(schema)
    for _ in range(3):
        text = texts.draw(rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string"}, ["", 'a"b', "é\n\\", "\u0001"]),
        ({"type": "integer", "minimum": -5, "maximum": 1234}, [-5, -1, 0, 7, 99, 1000, 1234]),
        ({"type": "integer", "minimum": 10}, [10, 99, 100, 10**15]),
        ({"type": "number"}, [0, -1, 1.5, 1e-3, 12345.678]),
        ({"type": "object"}, [{}, {"a": {"b": [1, None, True]}}]),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"]},
            [{"b": None}, {"a": 1, "b": None}],
        ),
        (
            {"properties": {key: {"type": "boolean"} for key in "abc"}},
            [{}, {"a": True}, {"b": True}, {"a": True, "c": False}, {"b": False, "c": True}],
        ),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, [[1], [1, 2, 3]]),
        ({"type": "array", "maxItems": 2}, [[], ["x"], [1, {}]]),
        ({"type": "string", "pattern": "b+$"}, ["b", "aab", '"bb']),
        ({"type": "string", "format": "ipv4"}, ["0.0.0.0", "255.249.99.1"]),
        ({"type": "string", "format": "hostname"}, ["anything"]),  # a format without a rule
        ({"type": "string", "nullable": True}, ["x", None]),
        ({"enum": ["a", 1], "type": "string"}, ["a"]),
    ],
)
def test_valid_values_are_allowed(schema: Any, values: list[Any]) -> None:
    """A grammar allows what its schema does, in the usual way of writing it."""
    texts = language(schema)
    for value in values:
        assert json.dumps(value, ensure_ascii=False) in texts, value
        assert json.dumps(value) in texts or not isinstance(value, str), value


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, '"a\nb"'),
        ({"type": "string"}, '"\\x"'),
        ({"type": "integer"}, "01"),
        ({"type": "integer", "minimum": 3, "maximum": 17}, "2"),
        ({"type": "integer", "minimum": 3, "maximum": 17}, "18"),
        ({"type": "integer", "minimum": 3, "maximum": 17}, "-3"),
        ({"type": "string", "maxLength": 2}, '"abc"'),
        ({"type": "array", "maxItems": 1}, "[1, 2]"),
        ({"properties": {"a": {}}, "required": ["a"]}, "{}"),
        ({"properties": {"a": {"type": "null"}}}, '{"b": null}'),
        ({"properties": {"a": {"type": "null"}}}, '{"a": null,}'),
        ({"enum": ["a", 1], "type": "string"}, "1"),
        ({"type": "string", "pattern": "^[^a]$"}, '"a"'),
    ],
)
def test_invalid_texts_are_not_allowed(schema: Any, text: str) -> None:
    """What is no JSON, or not valid by the schema, is outside of the grammar."""
    assert text not in language(schema)


def _nested(n: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (False, "object"),
        ([], "object"),
        ("x", "object"),
        ({"type": "strong"}, "type"),
        ({"type": 3}, "type"),
        ({"if": {}, "type": "null"}, "'if'"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "minimum": 0.5}, "bounds"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"$ref": "https://example.org/x.json"}, "$ref"),
        ({"$ref": "#/$defs/nothing"}, "refers to nothing"),
        ({"$ref": "#"}, "itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
          "allOf": [{"$ref": "#/$defs/a"}]}, "circle"),
        ({"enum": []}, "enum"),
        ({"enum": list(range(2000))}, "enum"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "above"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"type": "string", "pattern": "(" * 500}, "nested"),
        ({"type": "string", "pattern": "a{99999}"}, "repetitions"),
        ({"type": "string", "pattern": "x" * 5000}, "characters"),
        ({"type": "string", "pattern": "a**"}, "escaped"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no integer"),
        ({"type": "integer", "minimum": "x"}, "bound"),
        ({"type": "number", "minimum": False}, "bounds"),
        ({"properties": {str(i): {} for i in range(3000)},
          "required": [str(i) for i in range(1000, 3000)]}, "parts"),
        (_nested(100), "levels"),
        ({"required": ["a"], "additionalProperties": False}, "not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(schema: Any, word: str) -> None:
    """A schema that is wrong, hostile, or beyond grammars is refused with a reason."""
    with pytest.raises(InvalidRequestError, match=re.escape(word)):
        parse_grammar(grammar_of_schema(schema))


@settings(deadline=None, max_examples=60)
@given(st.integers(-3000, 3000), st.integers(0, 3000), st.integers(-7000, 7000))
def test_bounds_of_integers(low: int, width: int, number: int) -> None:
    """An integer is allowed exactly where it lies within the bounds."""
    texts = language({"type": "integer", "minimum": low, "maximum": low + width})
    for value in (number, low, low + width, low - 1, low + width + 1):
        assert (str(value) in texts) == (low <= value <= low + width)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 1.5, "maximum": 4}, "2 3 4", "1 5"),
        ({"minimum": -2, "exclusiveMaximum": 1.5}, "-2 -1 0 1", "-3 2"),
        ({"exclusiveMinimum": -3, "exclusiveMaximum": -0.5}, "-2 -1", "-3 0"),
        ({"minimum": 2, "exclusiveMinimum": 0, "maximum": 3.5}, "2 3", "1 4"),
    ],
)
def test_exclusive_bounds_between_integers_shut_out_no_integer_inside(
    schema: Any, inside: str, outside: str
) -> None:
    """2 is above 1.5, though not by 1."""
    texts = language({"type": "integer", **schema})
    assert all(text in texts for text in inside.split())
    assert not any(text in texts for text in outside.split())


def test_a_thousand_values_of_an_enum_are_one_choice() -> None:
    """They all begin with a quote, which counted as a thousand ways to read it."""
    values = [f"city of {i}" for i in range(999)] + [12]
    texts = language({"enum": values})
    assert all(json.dumps(value) in texts for value in values)
    assert '"city of "' not in texts
    assert "1" not in texts


@pytest.mark.parametrize("required", [[], ["p0"], ["p501"], ["p0", "p501"]])
def test_more_than_172_optional_properties_were_too_many_ways_to_read(required: list[str]) -> None:
    """Behind a comma any of those left may follow, and is one way to read it."""
    names = ["p0", *(f"p{i}" for i in range(2, 501)), "p501"]
    properties = {name: {"type": "null"} for name in names if required or name != "p2"}
    texts = language({"properties": properties, "required": required})
    for some in (["p0", "p7", "p450", "p501"], ["p0", "p501"], ["p0"], ["p3", "p501"], ["p9"], []):
        text = json.dumps(dict.fromkeys(some))
        assert (text in texts) == (set(required) <= set(some))
    assert '{"p7": null, "p3": null}' not in texts
    assert '{"p0": null, "p501": null,}' not in texts


def test_too_many_optional_properties_are_refused_in_words() -> None:
    """Not as ways to read a text, of which a schema knows nothing."""
    members: dict[str, Any] = {f"p{i}": {} for i in range(501)}
    with pytest.raises(InvalidRequestError, match="at most 500 optional properties in a row"):
        grammar_of_schema({"properties": members})
    assert grammar_of_schema({"properties": members, "required": ["p250"]})
