"""The form that an answer has to take: grammar, JSON schema, response_format, a forced call."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from loragraph.errors import InvalidRequestError
from loragraph.server.json_pattern import choice_grammar, regex_grammar
from loragraph.server.json_schema import ANY_OBJECT, grammar_of_schema

if TYPE_CHECKING:
    from loragraph.server.openai.fields import ChatBody, GenerationBody, Tool


def grammar_of(body: GenerationBody) -> str | None:
    """The GBNF that a request asks for in whatever way; not on the event loop."""
    if body.grammar is not None:
        return body.grammar or None
    if body.json_schema is not None:
        return cached_grammar(body.json_schema)
    for field, (kind, value) in body.forms().items():
        return _guided(field, kind, value)
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.schema_ is not None:
        return cached_grammar(form.schema_)
    if form.type == "json_object":
        return cached_grammar(dict(ANY_OBJECT))
    wrapped = form.json_schema or {}
    if "schema" not in wrapped:
        raise InvalidRequestError(
            "response_format: expected json_schema.schema", param="response_format"
        )
    return cached_grammar(wrapped["schema"])


def _guided(field: str, kind: str, value: Any) -> str:
    """The GBNF of one of vLLM's or SGLang's forms."""
    if kind == "grammar":
        return str(value)
    if kind == "regex":
        return regex_grammar(value)
    if kind == "choice":
        return choice_grammar(value)
    return cached_grammar(_parsed(value, field) if isinstance(value, str) else value)


def _parsed(text: str, field: str) -> Any:
    """JSON inside of JSON, under the same rules as the body around it: no NaN, no infinity."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {error}", param=field) from error


def call_schema(body: ChatBody) -> dict[str, Any] | None:
    """The schema of the calls that `tool_choice` forces: a list of {"name", "arguments"}."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tools = body.tools or []
    if not isinstance(choice, str):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise InvalidRequestError("tool_choice: no such tool among 'tools'", param="tool_choice")
    single = not isinstance(choice, str) or body.parallel_tool_calls is False
    calls = [_call_schema(tool) for tool in tools]
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        definitions[f"tool-{index}"] = _moved(parameters, f"#/$defs/tool-{index}")
        calls[index]["properties"]["arguments"] = {"$ref": f"#/$defs/tool-{index}"}
    return {
        "$defs": definitions,
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "maxItems": 1 if single else 16,
    }


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": {}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str, depth: int = 0) -> Any:
    """A schema whose references into itself are right where it now stands."""
    if depth > 100:
        raise InvalidRequestError("tools: parameters are too deeply nested", param="tools")
    if isinstance(schema, list):
        return [_moved(part, place, depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _moved(value, place, depth + 1) for key, value in schema.items()}
    ref = out.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        out["$ref"] = place + ref[1:]
    return out


def cached_grammar(schema: Any) -> str:
    """`grammar_of_schema`, kept for the next request with the same schema."""
    try:
        key = json.dumps(schema, allow_nan=False)  # 1e400 in a body is an infinity by now
    except ValueError as error:
        raise InvalidRequestError(f"JSON schema: {error}", param="json_schema") from error
    return _grammar(key)


@lru_cache(maxsize=64)
def _grammar(schema: str) -> str:
    return grammar_of_schema(_parsed(schema, "json_schema"))
