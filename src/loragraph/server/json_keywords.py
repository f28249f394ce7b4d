"""Keywords of JSON schemas: what they are about, and what two schemas together say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from loragraph.errors import InvalidRequestError

MAX_ITEMS = 2000
MAX_REF = 1000

ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "strict", "format", "contentMediaType", "contentEncoding", "nullable"),
    )
)
BY_TYPE = {
    "object": (
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "exclusiveMinimum"),
    "boolean": (),
    "null": (),
}
_TYPES = tuple(BY_TYPE)


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows; one without `type`: those that its keywords speak of."""
    kinds = schema.get("type")
    if kinds is None:
        found = [kind for kind, keys in BY_TYPE.items() if set(keys) & set(schema)]
        if "number" in found and "integer" in found:
            found = ["number"]
        if len(found) != 1:
            raise refused("expected a 'type'")
        return found
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if (
        not isinstance(kinds, list)
        or not 0 < len(kinds) <= len(_TYPES)
        or not all(kind in _TYPES for kind in kinds)
    ):
        raise refused(f"expected a type of {', '.join(_TYPES)}, got {schema['type']!r:.60}")
    if schema.get("nullable") is True and "null" not in kinds:
        kinds = [*kinds, "null"]
    return list(dict.fromkeys(kinds))


def only_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A schema for one of its types."""
    keep = {"format", *BY_TYPE[kind]}
    return {"type": kind, **{key: value for key, value in schema.items() if key in keep}}


def kinds_of(value: Any) -> set[str]:
    """The types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}


def merged(one: Any, other: Any) -> Any:
    """A schema that both allow; refused where that takes more than laying them together."""
    if one is True or one == {}:
        return other
    if other is True or other == {}:
        return one
    if not isinstance(one, dict) or not isinstance(other, dict):
        raise refused("'allOf' of these is not supported")
    out = dict(one)
    for key, value in other.items():
        if key not in out or out[key] == value or key in ANNOTATIONS:
            out[key] = value
        elif key == "properties" and isinstance(value, dict) and isinstance(out[key], dict):
            out[key] = dict(out[key])
            for name, schema in value.items():
                out[key][name] = merged(out[key].get(name, True), schema)
        elif key == "required" and are_texts(value) and are_texts(out[key]):
            out[key] = list(dict.fromkeys([*out[key], *value]))
        else:
            raise refused(f"two unlike {key!r:.40} in one schema are not supported")
    return out


def target_of(root: Any, ref: str) -> Any:
    """What a reference (#/...) into a schema refers to."""
    if len(ref) > MAX_REF:
        raise refused(f"'$ref': expected at most {MAX_REF} characters, got {len(ref)}")
    target = root
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        is_index = key.isascii() and key.isdecimal() and len(key) < 10
        if isinstance(target, list) and is_index and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            raise refused(f"{ref!r:.80} refers to nothing")
    return target


def n_values(value: Any) -> int:
    """How many values a schema is made of, itself among them."""
    n = 0
    todo = [value]
    while todo:
        one = todo.pop()
        n += 1
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return n


def bounds_of(schema: Mapping[str, Any], low: str, high: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for key, value in ((low, least), (high, 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ITEMS:
            raise refused(f"{key!r}: expected 0 to {MAX_ITEMS}, got {value!r:.40}")
    if most is not None and most < least:
        raise refused(f"{low!r} is above {high!r}")
    return least, most


def repeated(item: str, least: int, most: int | None) -> str:
    """`least` to `most` items with commas between."""
    if most == 0:
        return ""
    low, high = max(0, least - 1), "" if most is None else most - 1
    body = f'{item} (ws "," ws {item}){{{low},{high}}}'
    return body if least else f"({body})?"


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"JSON schema: {why}", param="json_schema")
