"""All routes below a path, by --api-prefix or by an ASGI server's root_path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from starlette.testclient import TestClient

from loragraph.errors import ConfigError
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.prefix import route_path
from tests.server.browser import running, tab
from tests.server.serving import Served, serving, write_files

PREFIX = "/llm/one"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a prefix and keys."""
    folder = tmp_path_factory.mktemp("prefix")
    write_files(folder)
    config = ServerConfig(api_prefix=PREFIX, api_keys=("k",), admin_keys=("boss",))
    with serving(folder, config) as one:
        yield one


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client with a key, at the root."""
    with served.client("k") as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/props", "/slots", "/lora-adapters", "/openapi.json"]
)
def test_routes_are_below_it_and_nowhere_else(http: httpx.Client, path: str) -> None:
    """404 in the shape of errors without it, and behind a longer word."""
    assert http.get(f"{PREFIX}{path}").status_code == 200
    for other in ("", "/llm", f"{PREFIX}x", f"{PREFIX}{PREFIX}"):
        answer = http.get(f"{other}{path}")
        assert answer.status_code == 404, other
        assert answer.json()["error"]["type"] == "not_found_error"


def test_openais_client(served: Served) -> None:
    """Its base_url has the prefix; streams too."""
    with openai.OpenAI(base_url=f"{served.url}{PREFIX}/v1", api_key="k", max_retries=0) as client:
        options: Any = {"model": "alpha", **CHAT, "temperature": 0}
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_public_paths_are_public_below_it(served: Served) -> None:
    """/health and the page's files need no key, everything else does."""
    with served.client() as client:
        for path in ("/", "/index.html", "/static/main.js", "/health"):
            assert client.get(f"{PREFIX}{path}").status_code == 200
        for path in ("/v1/models", "/api/state", "/llm/one/health"):
            assert client.get(f"{PREFIX}{path}").status_code == 401


def test_the_prefix_alone_leads_to_the_page(http: httpx.Client) -> None:
    """By a relative address, as the page's own are."""
    answer = http.get(PREFIX)

    assert answer.status_code == 307
    assert answer.headers["location"] == "one/"
    assert http.get(PREFIX, follow_redirects=True).headers["content-type"].startswith("text/html")
    assert http.post(PREFIX).status_code == 404


def test_the_document_names_it(http: httpx.Client) -> None:
    """Clients made from it ask below the prefix."""
    assert http.get(f"{PREFIX}/openapi.json").json()["servers"] == [{"url": PREFIX}]


def test_comparing_below_it(http: httpx.Client) -> None:
    """Its requests come through the application once more, under the same prefix."""
    answer = http.post(f"{PREFIX}/api/compare", json={"requests": [CHAT, CHAT]})

    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert not [line for line in lines if "error" in line]
    assert sum("end" in line for line in lines) == 2


def test_the_page_in_a_browser(served: Served) -> None:
    """It loads, takes the key, lists adapters and asks, all below the prefix."""
    with running() as browser, tab(browser, f"{served.url}{PREFIX}") as one:
        one.page.locator("#status", has_text="key needed").wait_for()
        one.ask("Why?")  # which opens the settings
        one.page.get_by_label("API key").fill("k")
        one.row("alpha").wait_for()
        one.ask("Why?", 5)
        assert one.answer("base")
        assert all(f"{PREFIX}/" in url for url in one.asked)


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_root_path_of_an_asgi_server(prefix: str) -> None:
    """Paths begin with it; keys, routes and our own prefix are asked of what is behind it."""
    app = create_app(None, ServerConfig(api_keys=("k",), api_prefix=prefix))
    client = TestClient(app, root_path="/outer")

    assert client.get(f"/outer{prefix}/static/main.js").status_code == 200
    assert client.get(f"/outer{prefix}/v1/models").status_code == 401
    assert client.get(f"/outer{prefix}/health").status_code == 503  # nothing is loaded
    with_key = {"Authorization": "Bearer k"}
    assert client.get(f"/outer{prefix}/nope", headers=with_key).status_code == 404


@pytest.mark.parametrize(
    "prefix", ["/", "llm", "/llm/", "//llm", "/../x", "/a/./b", "/a b", "/a?b", "/é", "/a%2fb"]
)
def test_prefixes_that_are_none(prefix: str) -> None:
    """Refused at the start."""
    with pytest.raises(ConfigError, match="api_prefix"):
        ServerConfig(api_prefix=prefix)


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/a/b", "", "/a/b"),
        ("/a/b", "/a", "/b"),
        ("/a/b", "/x", "/a/b"),
        ("/ab/c", "/a", "/ab/c"),
        ("/a", "/a", "/a"),
        ("/a/", "/a", "/"),
    ],
)
def test_what_routes_look_at(path: str, root: str, expected: str) -> None:
    """The path behind the root, where it is behind it."""
    assert route_path({"path": path, "root_path": root}) == expected
