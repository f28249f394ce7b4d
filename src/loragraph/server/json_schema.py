"""JSON schemas as GBNF grammars: what a grammar allows is valid JSON, and valid by its schema.

A keyword that the grammar would not keep to is refused, never dropped; annotations are no rules.
Where a schema leaves properties open, only those that it names are generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from loragraph.server.gbnf_parts import literal, rules_of_texts
from loragraph.server.json_keywords import (
    ANNOTATIONS,
    BY_TYPE,
    are_texts,
    bounds_of,
    kinds_of,
    merged,
    n_values,
    only_type,
    refused,
    repeated,
    target_of,
    types_of,
)
from loragraph.server.json_numbers import integer_bounds, integer_rule
from loragraph.server.json_pattern import ANY_CHAR, Ranges, json_char, pattern_rule

MAX_NODES = 2000
MAX_DEPTH = 48
MAX_VALUES = 1000
MAX_GRAMMAR = 1 << 18
MAX_MERGED = 1 << 17
MAX_OPTIONAL = 500  # each may be the next: the engine follows 512 ways to read a text

_ALL = ("type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf")

_PRIMITIVES = {
    "ws": '| " " | "\\n" [ \\t]{0,20}',
    ANY_CHAR: '[^"\\\\\\x00-\\x1F\\x7F] | "\\\\" (["\\\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": f'"\\"" {ANY_CHAR}* "\\""',
    "digits": '"0" | [1-9] [0-9]{0,15}',
    "integer": '"-"? digits',
    "fraction": '("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "number": '"-"? digits fraction',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "object": '"{" ws (pair (ws "," ws pair)*)? ws "}"',
    "pair": 'string ws ":" ws value',
    "array": '"[" ws (value (ws "," ws value)*)? ws "]"',
    "value": "object | array | string | number | boolean | null",
}
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "email": r"^[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}$",
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of response_format json_object."""


def grammar_of_schema(schema: Any) -> str:
    """The GBNF of a schema, start rule `root`; InvalidRequestError for one that is refused."""
    return _Converter(schema).grammar()


class _Converter:
    """The rules of one schema, by name."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: dict[str, str] = {}
        self._by_ref: dict[str, str] = {}
        self._by_ranges: dict[Ranges, str] = {}
        self._n_nodes = 0
        self._n_chars = 0
        self._n_merged = 0
        self._targets: dict[str, Any] = {}
        self._depth = 0

    def grammar(self) -> str:
        """The text of all rules."""
        top = self._visit(self._root)
        self._define("root", f'" "? {top}')
        return "\n".join(f"{name} ::= {body}" for name, body in self._rules.items())

    def _visit(self, schema: Any) -> str:
        """The rule's name of what a schema allows."""
        self._count_part()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise refused(f"expected at most {MAX_DEPTH} levels, got more")
        if schema is True or schema == {}:
            rule = self._need("value")
        elif not isinstance(schema, dict):
            raise refused(f"expected an object, got {schema!r:.60}")
        else:
            rule = self._object(schema)
        self._depth -= 1
        return rule

    def _count_part(self) -> None:
        self._n_nodes += 1
        if self._n_nodes > MAX_NODES:
            raise refused(f"expected at most {MAX_NODES} parts, got more")

    def _object(self, schema: dict[str, Any]) -> str:
        unknown = sorted(
            set(schema)
            - ANNOTATIONS
            - set(_ALL)
            - {key for keys in BY_TYPE.values() for key in keys}
        )
        if unknown:
            raise refused(f"the keyword {unknown[0]!r:.60} is not supported")
        if "$ref" in schema:
            return self._reference(schema)
        if "const" in schema or "enum" in schema:
            return self._values(schema)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                return self._combined(schema, keyword)
        kinds = types_of(schema)
        if len(kinds) > 1:
            rest = {key: value for key, value in schema.items() if key != "type"}
            return self._union([self._visit(only_type(rest, kind)) for kind in kinds])
        kind = kinds[0]
        stray = sorted(
            set(schema) - ANNOTATIONS - {"type", *BY_TYPE[kind]} if "type" in schema else ()
        )
        # A keyword of another type says nothing about this one.
        schema = {key: value for key, value in schema.items() if key not in stray}
        makers: Mapping[str, Callable[[dict[str, Any]], str]] = {
            "object": self._members,
            "array": self._items,
            "string": self._text,
            "integer": self._integer,
            "number": self._number,
        }
        return makers[kind](schema) if kind in makers else self._need(kind)

    # -- combinations ------------------------------------------------------------------------------

    def _reference(self, schema: dict[str, Any]) -> str:
        ref = schema["$ref"]
        others = set(schema) - ANNOTATIONS - {"$ref"}
        if others:
            raise refused(f"{min(others)!r} beside '$ref' is not supported")
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise refused(f"expected a '$ref' into this schema (#/...), got {ref!r:.80}")
        known = self._by_ref.get(ref)
        if known is None:
            known = self._by_ref[ref] = f"ref-{len(self._by_ref)}"
            self._define(known, self._visit(self._target(ref)))
            if self._rules[known] == known:
                raise refused(f"{ref!r:.80} refers to itself alone")
        return known

    def _target(self, ref: str) -> Any:
        if ref not in self._targets:
            self._targets[ref] = target_of(self._root, ref)
        return self._targets[ref]

    def _values(self, schema: dict[str, Any]) -> str:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not 0 < len(values) <= MAX_VALUES:
            raise refused(f"enum: expected 1 to {MAX_VALUES} values")
        if "const" in schema:
            const = schema["const"]
            if not any(value == const and kinds_of(value) & kinds_of(const) for value in values):
                raise refused("'const' is not among 'enum'")
            values = [const]
        if "type" in schema:
            kinds = types_of(schema)
            values = [value for value in values if kinds_of(value) & set(kinds)]
        if not values:
            raise refused("no value of 'enum' has the type")
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        top = f"r{len(self._rules)}"
        for name, body in rules_of_texts(texts, top, param="json_schema").items():
            self._define(name, body)
        return top

    def _combined(self, schema: dict[str, Any], keyword: str) -> str:
        parts = schema[keyword]
        if not isinstance(parts, list) or not 0 < len(parts) <= MAX_VALUES:
            raise refused(f"{keyword}: expected a list of schemas")
        rest = {key: value for key, value in schema.items() if key != keyword}
        if not set(rest) - ANNOTATIONS:
            rest = {}
        if keyword == "allOf":
            whole: Any = rest
            for part in parts:
                whole = self._merged(whole, part)
            return self._visit(whole)
        if not rest:
            return self._union([self._visit(part) for part in parts])
        return self._union([self._visit(self._merged(rest, part)) for part in parts])

    def _merged(self, whole: Any, part: Any) -> Any:
        """`merged` with what a part refers to; refused where that is too much in all."""
        self._count_part()
        part = self._followed(part)
        self._n_merged += n_values(whole) + n_values(part)
        if self._n_merged > MAX_MERGED:
            raise refused(f"expected at most {MAX_MERGED} values to lay together, got more")
        return merged(whole, part)

    def _followed(self, schema: Any) -> Any:
        """What a schema that is only a reference refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if set(schema) - ANNOTATIONS - {"$ref"} or not isinstance(schema["$ref"], str):
                return schema  # refused where it is visited
            schema = self._target(schema["$ref"])
        raise refused("references go round in a circle")

    def _union(self, rules: Sequence[str]) -> str:
        return rules[0] if len(rules) == 1 else self._new(" | ".join(dict.fromkeys(rules)))

    # -- types -------------------------------------------------------------------------------------

    def _members(self, schema: dict[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not are_texts(required):
            raise refused("'properties' or 'required' has a wrong type")
        if len(required) > MAX_NODES:
            raise refused(f"required: expected at most {MAX_NODES} names, got {len(required)}")
        extra = schema.get("additionalProperties", True)
        least, most = bounds_of(schema, "minProperties", "maxProperties")
        if not properties and not required:
            if extra is False:
                return self._at_least(least, 0, self._new('"{" ws "}"'))
            if extra is True and (least, most) == (0, None):
                return self._need("object")
            pair = self._new(f'{self._need("string")} ws ":" ws {self._visit(extra)}')
            return self._new(f'"{{" ws {repeated(pair, least, most)} ws "}}"')
        properties = dict(properties)
        for name in required:
            if name not in properties:
                # The last word on a property that is required, but described nowhere.
                if extra is False:
                    raise refused(f"{name!r:.60} is required, and not allowed")
                properties[name] = extra
        most = len(properties) if most is None else most
        if most < len(properties) or least > len(set(required)):
            raise refused("'minProperties' and 'maxProperties' are not supported beside these")
        return self._new(f'"{{" ws {self._pairs(properties, set(required))}"}}"')

    def _pairs(self, properties: dict[str, Any], required: set[str]) -> str:
        """Named members in their order: a rule for each says which may be the next."""
        self._need("ws")
        following = ""
        nothing = True  # whether all that follow may be left out
        n_next = 0
        for name, schema in reversed(properties.items()):
            key = literal(json.dumps(name, ensure_ascii=False))
            pair = f'{key} ws ":" ws {self._visit(schema)} ws'
            # the comma stands before the choice: else each choice is a way to read it
            tail = f'"," ws {following}' if following else ""
            here = f"{pair} ({tail})?" if tail and nothing else f"{pair} {tail}"
            if name in required:
                following, nothing, n_next = self._new(here), False, 0
            elif n_next == MAX_OPTIONAL:
                raise refused(f"expected at most {MAX_OPTIONAL} optional properties in a row")
            else:
                n_next += 1
                following = self._new(f"{here} | {following}" if following else here)
        return f"({following})? " if nothing else f"{following} "

    def _items(self, schema: dict[str, Any]) -> str:
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", not prefix)
        least, most = bounds_of(schema, "minItems", "maxItems")
        if isinstance(items, list):  # the older word for prefixItems
            prefix, items = items, False
        if not isinstance(prefix, list) or len(prefix) > MAX_VALUES:
            raise refused("'prefixItems' has a wrong type")
        if not prefix:
            if items is False:
                return self._at_least(least, 0, self._new('"[" ws "]"'))
            return self._new(f'"[" ws {repeated(self._visit(items), least, most)} ws "]"')
        if not (most is None or most >= len(prefix)) or (items is False and least > len(prefix)):
            raise refused("'minItems' and 'maxItems' are not supported beside these")
        body = ' ws "," ws '.join(self._visit(item) for item in prefix)
        if items is not False and (items is not True or least > len(prefix)):
            item = self._visit(items)
            low = max(0, least - len(prefix))
            high = "" if most is None else most - len(prefix)
            body += f' (ws "," ws {item}){{{low},{high}}}'
        return self._new(f'"[" ws {body} ws "]"')

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = bounds_of(schema, "minLength", "maxLength")
        pattern = schema.get("pattern", _FORMATS.get(str(schema.get("format"))))
        if pattern is None and (least, most) == (0, None):
            return self._need("string")
        self._need(ANY_CHAR)
        if pattern is None:
            high = "" if most is None else most
            return self._new(f'"\\"" {ANY_CHAR}{{{least},{high}}} "\\""')
        if not isinstance(pattern, str):
            raise refused("'pattern' has a wrong type")
        if (least, most) != (0, None):
            raise refused("a length beside 'pattern' or 'format' is not supported")
        self._count_chars(len(pattern))  # reading it takes time, however short its rule
        return self._new(pattern_rule(pattern, self._char))

    def _integer(self, schema: dict[str, Any]) -> str:
        low, high = integer_bounds(schema)
        if low is None and high is None:
            return self._need("integer")
        self._need("digits")
        return self._new(integer_rule(low, high))

    def _number(self, schema: dict[str, Any]) -> str:
        bounds = {key: schema[key] for key in BY_TYPE["number"] if key in schema}
        if not bounds:
            return self._need("number")
        if bounds != {"minimum": 0} or isinstance(bounds["minimum"], bool):
            raise refused("bounds of numbers other than 'minimum': 0 are not supported")
        self._need("number")
        return self._new("digits fraction")

    def _at_least(self, least: int, got: int, rule: str) -> str:
        if least > got:
            raise refused(f"at least {least} are wanted, and none allowed")
        return rule

    # -- rules -------------------------------------------------------------------------------------

    def _char(self, ranges: Ranges) -> str:
        """GBNF of one character of these ranges: a rule of its own where that takes long."""
        known = self._by_ranges.get(ranges)
        if known is None:
            text = json_char(ranges)
            known = self._by_ranges[ranges] = text if len(text) < 16 else self._new(text)
        return known

    def _new(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._define(name, body)
        if " ws" in body or body.startswith("ws"):
            self._need("ws")
        return name

    def _define(self, name: str, body: str) -> None:
        self._count_chars(len(name) + len(body) + 6)
        self._rules[name] = body

    def _count_chars(self, n: int) -> None:
        """Refused as soon as it is too much: a schema can ask for far more than it says itself."""
        self._n_chars += n
        if self._n_chars > MAX_GRAMMAR:
            raise refused(f"its grammar and patterns take more than {MAX_GRAMMAR} characters")

    def _need(self, name: str) -> str:
        """A primitive's rule, with those that it is made of."""
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in self._rules:
                self._define(one, _PRIMITIVES[one])
                todo += [part for part in _PRIMITIVES if part in _words(_PRIMITIVES[one])]
        return name


def _words(body: str) -> Iterator[str]:
    word = ""
    for char in body + " ":
        if char.isalpha():
            word += char
        else:
            yield word
            word = ""
