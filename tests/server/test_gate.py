"""Keys, origins, request ids and the limits of bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from starlette.testclient import TestClient

from loragraph.errors import ConfigError
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig

KEYS = ServerConfig(api_keys=("one", "zwei \u00fc"), admin_keys=("boss",))


def client(config: ServerConfig) -> TestClient:
    """A client of a server that is loading: what passes the gate is a 503."""
    return TestClient(create_app(None, config), base_url="http://localhost")


@pytest.fixture
def guarded() -> Iterator[TestClient]:
    """A server with keys."""
    with client(KEYS) as one:
        yield one


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer two"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer one"}, 503),
        ({"Authorization": "bearer one"}, 503),
        ({"X-Api-Key": "one"}, 503),
        ({"X-Api-Key": "on"}, 401),
        ({"Authorization": "Bearer boss"}, 503),
    ],
)
def test_keys(guarded: TestClient, headers: Mapping[str, str], status: int) -> None:
    """One of the keys, or an admin key, lets a request in; nothing else does."""
    answer = guarded.get("/v1/models", headers=headers)

    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/models", "invalid_api_key"),
        ("/v1/models/x", "invalid_api_key"),
        ("/v1/chat/completions", "invalid_api_key"),
        ("/completions", 401),
        ("/tokenize", 401),
    ],
)
def test_a_wrong_key_had_no_code_of_openais(
    guarded: TestClient, path: str, code: str | int
) -> None:
    """As its clients compare it; no key at all has none there either."""
    error = guarded.get(path, headers={"Authorization": "Bearer two"}).json()["error"]

    assert (error["code"], error["reason"]) == (code, "invalid_api_key")
    assert guarded.get(path).json()["error"]["code"] == 401


def test_health_is_open(guarded: TestClient) -> None:
    """/health asks for no key, and says that the server is loading."""
    answer = guarded.get("/health")

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Loading model"
    assert answer.headers["retry-after"]


@pytest.mark.parametrize(
    ("config", "key", "status"),
    [
        (KEYS, "one", 403),
        (KEYS, "boss", 503),
        (ServerConfig(api_keys=("one",)), "one", 403),
        (ServerConfig(admin_keys=("boss",)), "boss", 503),
        (ServerConfig(), "", 503),
    ],
)
def test_changes_take_an_admin_key(config: ServerConfig, key: str, status: int) -> None:
    """Once there are keys, routes that change the server take an admin key."""
    with client(config) as one:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = one.post("/v1/unload_lora_adapter", json={"lora_name": "x"}, headers=headers)

    assert answer.status_code == status


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        ((), None, 503),
        ((), "http://localhost", 503),
        ((), "http://evil.example", 403),
        ((), "null", 403),
        (("https://app.example",), "https://app.example", 503),
        (("https://app.example",), "https://other.example", 403),
    ],
)
def test_pages_of_other_origins(origins: tuple[str, ...], origin: str | None, status: int) -> None:
    """A browser's request comes from the server's own page or from an origin that is allowed."""
    with client(ServerConfig(cors_origins=origins)) as one:
        headers = {} if origin is None else {"Origin": origin}
        answer = one.post("/v1/chat/completions", json={"messages": []}, headers=headers)

    # The body is looked at behind the gate.
    assert (answer.status_code == 403) == (status == 403)


def test_cors_preflight() -> None:
    """An allowed origin's preflight is answered, without a key."""
    config = ServerConfig(cors_origins=("https://app.example",), api_keys=("one",))
    with client(config) as one:
        answer = one.options(
            "/v1/models",
            headers={"Origin": "https://app.example", "Access-Control-Request-Method": "GET",
                     "Access-Control-Request-Headers": "authorization"},
        )  # fmt: skip

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_every_origin_without_a_key_is_refused() -> None:
    """'*' for a server that is open to all would let any page change it."""
    with pytest.raises(ConfigError, match="every page"):
        ServerConfig(cors_origins=("*",))


@pytest.mark.parametrize("given", ["abc-1:2", "", "a b", "x" * 200, "é"])
def test_request_ids(given: str) -> None:
    """A usable X-Request-Id comes back, any other is replaced; errors have one too."""
    with client(ServerConfig()) as one:
        answer = one.get("/v1/models", headers=[(b"X-Request-Id", given.encode())])

    if given == "abc-1:2":
        assert answer.headers["x-request-id"] == given
    else:
        assert answer.headers["x-request-id"].startswith("req-")


def test_large_bodies() -> None:
    """A body above the limit is a 413, whether its length is told or not."""
    with client(ServerConfig(max_body_bytes=1000)) as one:
        told = one.post("/v1/chat/completions", content=b"x" * 2000)
        untold = one.post("/v1/chat/completions", content=iter([b"x" * 600] * 3))
        small = one.post("/v1/chat/completions", content=b"{}")

    assert (told.status_code, untold.status_code, small.status_code) == (413, 413, 400)
    assert told.json()["error"]["message"] == "expected a body of at most 1000 bytes, got 2000"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 503),
        ("LOCALHOST.", 503),
        ("[::1]:8080", 503),
        ("[::1]", 503),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("evil.example@localhost", 403),
        ("127.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_known_hosts(host: str, status: int) -> None:
    """A name that is not listed is refused, whatever its port: a page may have made it ours."""
    with client(ServerConfig(allowed_hosts=("localhost", "::1"))) as one:
        assert one.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("allowed", [(), ("*",)])
def test_any_host(allowed: tuple[str, ...]) -> None:
    """Without a list, and with a star, no name is refused."""
    with client(ServerConfig(allowed_hosts=allowed)) as one:
        assert one.get("/health", headers={"Host": "evil.example"}).status_code == 503
