"""Clients that leave, that read slowly, and what they cost the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyLlama

PATHS = ("/v1/completions", "/v1/chat/completions")
LONG = {"ignore_eos": True, "max_tokens": 3000, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose answers may be long; a client that reads nothing for a while is cut off."""
    folder = tmp_path_factory.mktemp("long")
    write_files(folder, TinyLlama(n_ctx_train=8192))
    config = ServerConfig(send_timeout_s=0.5)
    with serving(folder, config, n_ctx=8192, max_sequences=4) as one:
        yield one


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A request for a long answer."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    )
    return {**prompt, **LONG, **fields}


def raw_request(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the rest to the caller."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """Until it holds; fails if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def is_idle(served: Served) -> bool:
    """Whether nothing is under way, neither here nor in the engine."""
    return not served.state.runs and served.engine.stats().core.n_jobs == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read_first", [False, True])
def test_a_client_that_leaves_ends_its_request(
    served: Served, path: str, stream: bool, read_first: bool
) -> None:
    """Before or within its answer, whether streamed or not, and with several choices."""
    before = served.engine.stats().core.n_generated_tokens
    sock = raw_request(served, path, body_of(path, stream=stream, n=2))
    wait_until(lambda: served.engine.stats().core.n_generated_tokens > before + 5)
    if read_first and stream:
        assert sock.recv(1000)
    sock.close()

    wait_until(lambda: is_idle(served))
    assert served.engine.stats().core.n_generated_tokens < before + 2 * 3000


def test_a_client_that_leaves_within_its_body(served: Served) -> None:
    """A body that never comes to its end reaches no route."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")

    with served.client() as client:
        assert client.get("/health").status_code == 200
    assert is_idle(served)


def test_leaving_one_of_several_prompts_ends_all(served: Served) -> None:
    """The runs of one request end together."""
    body = body_of(PATHS[0], prompt=["a", "b", "c"], stream=True)
    sock = raw_request(served, PATHS[0], body)
    wait_until(lambda: len(served.state.runs) == 3)
    sock.close()

    wait_until(lambda: is_idle(served))


def test_slow_readers_do_not_slow_others(served: Served) -> None:
    """Two clients that read nothing leave their answers in memory; a third one is served, and they
    are cut off after a while.
    """
    slow = []
    for _ in range(2):
        host, port = served.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        data = json.dumps(body_of(PATHS[0], stream=True, logprobs=100, max_tokens=1200)).encode()
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        slow.append(sock)
    wait_until(lambda: len(served.state.runs) == 2)

    with served.client() as client:
        got = client.post(PATHS[0], json={"prompt": "b", **LONG, "max_tokens": 30})
        assert got.json()["usage"]["completion_tokens"] == 30
        # Their generations end though nobody reads them, and then their connections do.
        wait_until(lambda: served.engine.stats().core.n_jobs == 0, 60)
        wait_until(lambda: not served.state.runs, 60)
        assert client.get("/health").json() == {"status": "ok"}
    for sock in slow:
        sock.close()


def test_the_event_loop_is_never_blocked(served: Served) -> None:
    """While long prompts are tokenised and large schemas converted, /health answers at once."""
    schema = {"properties": {f"p{i}": {"type": "string", "pattern": "^(a|b){1,40}$"}
                             for i in range(150)}}  # fmt: skip
    heavy = [
        body_of(PATHS[0], prompt="the world " * 200_000, max_tokens=1),
        body_of(PATHS[0], json_schema=schema, max_tokens=1),
    ]
    with served.client() as client, served.client() as other:
        threads = [
            threading.Thread(target=client.post, args=(PATHS[0],), kwargs={"json": body})
            for body in heavy
        ]
        for thread in threads:
            thread.start()
        longest = 0.0
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert other.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - start)
        for thread in threads:
            thread.join()
    assert longest < 2.0  # the machine may be busy; a blocked loop takes longer
