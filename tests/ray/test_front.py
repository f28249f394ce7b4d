"""The front in Ray: a second application beside it, keys behind Serve's proxy, its own death."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest

from loragraph.errors import BackendError
from tests.ray.cluster import Front, front, text_of, wait_until
from tests.ray.conftest import RayServed
from tests.ray.test_cluster import LONG, actor_of, generation_of, loaded, ready_replicas

PREFIX, ORIGIN = "/keyed", "https://app.example"


@pytest.fixture(scope="module")
def keyed(served: RayServed) -> Iterator[Front]:
    """A second application of the same Serve, with keys, below a route prefix of Serve's."""
    options = {
        "replicas": 1,
        "catalogue_dir": served.folder / "keyed",
        "api_keys": ("user",),
        "admin_keys": ("admin",),
        "cors_origins": (ORIGIN,),
        "max_body_bytes": 4096,
    }
    with front(served.folder, beside=served, name="keyed", route_prefix=PREFIX, **options) as one:
        yield one


def test_two_applications_beside_each_other(
    served: RayServed, keyed: Front, http: httpx.Client
) -> None:
    """Each has its own routes, catalogue and replicas; the texts are the same."""
    with keyed.client("admin") as other:
        assert text_of(other, "alpha") == text_of(http, "alpha")
        body = {"lora_name": "alpha", "lora_path": "beta.gguf", "load_inplace": True}
        assert other.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert text_of(other, "alpha") == text_of(http, "beta") != text_of(http, "alpha")
        own = {one["id"] for one in other.get("/replicas").json()["replicas"]}
        page = other.get("/")
    assert not own & set(served.table())
    assert page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("key", "method", "path", "status"),
    [
        ("", "GET", "/health", 200),
        ("", "GET", "/static/main.js", 200),
        ("", "GET", "/v1/models", 401),
        ("", "GET", "/metrics", 401),
        ("", "GET", "/replicas", 401),
        ("other", "GET", "/v1/models", 401),
        ("user", "GET", "/v1/models", 200),
        ("user", "GET", "/replicas", 200),
        ("user", "GET", "/nothing", 404),
        ("user", "POST", "/v1/unload_lora_adapter", 403),
        ("admin", "POST", "/v1/unload_lora_adapter", 404),
    ],
)
def test_keys_behind_serves_proxy(
    keyed: Front, key: str, method: str, path: str, status: int
) -> None:
    """As at the single server; each answer has one request id, the client's own."""
    with keyed.client(key) as http:
        body = {"lora_name": "nobody"} if method == "POST" else None
        answer = http.request(method, path, json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == ["mine-1"]


@pytest.mark.parametrize("given", ["a b", "x" * 200])
def test_request_ids_behind_serves_proxy(keyed: Front, given: str) -> None:
    """The proxy gives back whatever came; ids of answers are made of one that is usable."""
    with keyed.client("user") as http:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        headers = {"X-Request-Id": given}
        answer = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.headers.get_list("x-request-id") == [given]
    assert answer.json()["id"].startswith("chatcmpl-req-")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
def test_pages_of_other_origins_may_read(keyed: Front, path: str) -> None:
    """What a replica answers and what the front does; a preflight needs no key."""
    with keyed.client("user") as http:
        answer = http.get(path, headers={"Origin": ORIGIN})
        other = http.get(path, headers={"Origin": "https://other.example"})
    with keyed.client() as nobody:
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "GET"}
        preflight = nobody.options(path, headers=asked)
        foreign = nobody.post(path, json={}, headers={"Origin": "https://other.example"})
    assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN]
    assert "X-Loragraph-Replica" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers
    assert preflight.status_code == 200
    assert foreign.status_code == 403


@pytest.mark.parametrize("told", [True, False])
def test_a_large_body_behind_serves_proxy(keyed: Front, told: bool) -> None:
    """Its answer is a 413, not a connection that was reset."""
    data = b" " * (1 << 20)
    with keyed.client("user") as http:
        content = data if told else iter([data[: 1 << 16]] * 16)
        answer = http.post("/v1/completions", content=content)
    assert answer.status_code == 413


def test_a_client_may_ask_for_a_replica(served: RayServed, http: httpx.Client) -> None:
    """By the header of an answer, as for the slots of just this one; a wrong word is no one's."""
    for id_ in served.table():
        for path in ("/slots", "/props", "/v1/models", "/api/state"):
            answer = http.get(path, headers={"X-Loragraph-Replica": id_})
            assert (answer.status_code, answer.headers["x-loragraph-replica"]) == (200, id_)
    assert http.get("/slots", headers={"X-Loragraph-Replica": "x"}).status_code == 200


@pytest.mark.parametrize(("name", "more"), [("loragraph", 0), ("third", 1)])
def test_what_is_in_the_way_on_a_cluster_is_told(served: RayServed, name: str, more: int) -> None:
    """An application of that name is not replaced; Serve listens where it did."""
    from loragraph.ray import local

    port = int(served.url.rpartition(":")[2])
    listen = local.Listen("127.0.0.1", port + more)
    with (
        pytest.raises(BackendError, match="already"),
        local.running(served.args, listen, name=name),
    ):
        pass
    assert len(ready_replicas(served)) == 2


def test_a_front_that_dies_is_replaced(served: RayServed, http: httpx.Client) -> None:
    """Its connections are cut; requests that come meanwhile wait for the next front, which has the
    same catalogue and serves on.
    """
    with loaded(http, "kept", "beta.gguf"):
        generation, expected = generation_of(http, "kept"), text_of(http, "kept")
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "a", **LONG, "stream": True}
        ) as got:
            lines = got.iter_lines()
            next(lines)
            kill_front()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        with ThreadPoolExecutor(4) as threads:

            def ask(_: int) -> str:
                with served.client() as own:
                    return text_of(own, "kept")

            assert set(threads.map(ask, range(8))) == {expected}
        assert generation_of(http, "kept") == generation
        body = {"lora_name": "kept", "lora_path": "gamma.gguf", "load_inplace": True}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert text_of(http, "kept") == text_of(http, "gamma")
        wait_until(lambda: all(one["busy"] == 0 for one in served.table().values()))


def kill_front() -> None:
    """As a machine's failure would."""
    import ray

    ray.kill(actor_of("loragraph#Front"))
