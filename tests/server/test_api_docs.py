"""docs/api.md names every field and route that the server knows, and only those."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loragraph.server.adapters_api import LoadBody, NameBody
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.openai.embeddings import EmbeddingBody
from loragraph.server.openai.fields import ChatBody, CompletionBody
from loragraph.server.sampling import Body

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")


def section(title: str) -> str:
    """The text under a heading that begins with `title`, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}.*?$(.*?)(?=^#{{1,2}} |\Z)", TEXT, re.M | re.S)
    assert found, f"no heading {title!r}"
    return found[2]


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (ChatBody, "OpenAI's routes"),
        (CompletionBody, "OpenAI's routes"),
        (EmbeddingBody, "OpenAI's routes"),
        (LoadBody, "vLLM's and SGLang's routes"),
        (NameBody, "vLLM's and SGLang's routes"),
    ],
)
def test_every_field_is_said_to_be_accepted_ignored_or_refused(
    body: type[Body], title: str
) -> None:
    """No field of a body is missing from its section."""
    named = set(re.findall(r"`(\w+)`", section(title)))

    assert sorted(set(body.model_fields) - named) == []


def test_every_route_is_named() -> None:
    """The document and the OpenAPI document know the same routes."""
    app = create_app(None, ServerConfig())
    routes = {path for path in app.openapi()["paths"] if path not in ("/", "/favicon.ico")}
    named = set(re.findall(r"(/[\w{}/-]+)", TEXT))

    assert sorted(routes - named) == []
