"""docs/api.md names every field and route that the server knows, and only those."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel
from starlette.routing import Match

from loragraph.server.adapters_api import LoadBody, NameBody
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.llamacpp import completion, refused, tokens
from loragraph.server.openai.embeddings import EmbeddingBody
from loragraph.server.openai.fields import ChatBody, CompletionBody
from loragraph.server.openai.vllm_fields import StructuredOutputs

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")

OPENAI = "Fields of `/v1/chat/completions` and `/v1/completions`"
EMBEDDINGS = "Fields of `/v1/embeddings`"
LLAMA = "Fields of `/completion` and `/infill`"
TOKENS = "Fields of `/tokenize`, `/detokenize` and `/apply-template`"
VLLM = "vLLM's and SGLang's routes"

# A body that takes unknown fields has those that it ignores or refuses in no field of its own.
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    OPENAI: (ChatBody, CompletionBody),
    EMBEDDINGS: (EmbeddingBody,),
    LLAMA: (completion.CompletionBody, completion.InfillBody),
    TOKENS: (tokens.TokenizeBody, tokens.DetokenizeBody, tokens.ApplyTemplateBody),
    VLLM: (LoadBody, NameBody),
}


def section(title: str) -> str:
    """The text under a heading, up to the next of any level."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", TEXT, re.M | re.S)
    assert found, f"no heading {title!r}"
    return found[1]


def words(text: str) -> set[str]:
    """The names in backquotes."""
    return set(re.findall(r"`(\w+)`", text))


def column(text: str, number: int) -> set[str]:
    """The names in a column of a text's tables."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in words(row[number].removeprefix("| "))}


def fields(bodies: Iterable[type[BaseModel]]) -> set[str]:
    """All their fields."""
    return {name for body in bodies for name in body.model_fields}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_is_said_to_be_accepted_ignored_or_refused(title: str) -> None:
    """No field of a body is missing from its section."""
    assert sorted(fields(SECTIONS[title]) - words(section(title))) == []


@pytest.mark.parametrize(
    ("title", "number"),
    [(OPENAI, 0), (EMBEDDINGS, 0), (TOKENS, 1), (VLLM, 1)],
)
def test_tables_name_no_field_that_there_is_not(title: str, number: int) -> None:
    """What is said to be accepted is a field of one of the bodies."""
    known = fields(SECTIONS[title])

    assert sorted(column(section(title), number) - known) == []


def test_what_is_ignored_or_refused_is_known_too() -> None:
    """Each name there is a field, so that it is no 400 for an unknown one."""
    text = section(OPENAI)
    paragraphs = [
        part for part in text.split("\n\n") if part.startswith(("Ignored,", "Refused with 400"))
    ]
    assert len(paragraphs) == 2
    known = fields((ChatBody, CompletionBody, StructuredOutputs))
    known |= {field.alias for field in StructuredOutputs.model_fields.values() if field.alias}

    assert sorted(set().union(*map(words, paragraphs)) - known) == []


def test_accepted_fields_of_completion_are_fields() -> None:
    """The first table is of what is accepted; what other tables name needs no field."""
    accepted, _, _ = section(LLAMA).partition("\nIgnored,")

    assert sorted(column(accepted, 0) - fields(SECTIONS[LLAMA])) == []


def test_every_route_is_named() -> None:
    """The document and the OpenAPI document know the same routes."""
    app = create_app(None, ServerConfig())
    routes = {path for path in app.openapi()["paths"] if path not in ("/", "/favicon.ico")}
    named = set(re.findall(r"(/[\w{}/-]+)", TEXT))

    assert sorted(routes - named) == []


def test_tables_name_no_route_that_there_is_not() -> None:
    """Every path in the first column of a table of routes is served."""
    app = create_app(None, ServerConfig(with_metrics=True))

    def is_served(path: str) -> bool:
        scope = {"type": "http", "path": path, "root_path": "", "method": "GET", "headers": []}
        return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)

    rows = re.findall(r"^\| (`(?:GET|POST) .*?) \|", TEXT, re.M)
    named = {path for row in rows for path in re.findall(r"(/[\w{}/:.-]*)", row)}

    assert len(named) > 25
    assert sorted(path for path in named if not is_served(path)) == []
    assert not is_served("/nothing")


def test_routes_that_are_refused_are_named() -> None:
    """Those of llama-server's that are a 501, by their /v1 form or the only one."""
    paths = {getattr(route, "path", "") for route in refused.router.routes}
    paragraph = next(part for part in TEXT.split("\n\n") if part.startswith("Refused with 501"))
    named = set(re.findall(r"`(?:POST )?(/[\w/]+)`", paragraph))

    named -= {"/v1", "/v1/embeddings"}  # what to use instead

    assert named <= paths
    assert {path for path in paths if path not in named and f"/v1{path}" not in named} <= {
        "/v1/rerank",
        "/v1/reranking",
    }
