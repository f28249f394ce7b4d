"""Generations of /completion that end before their time: limits of time, clients that go."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.server.serving import Served, serving, write_files

LONG = {"temperature": 0, "n_predict": 15_000, "ignore_eos": True}  # takes seconds


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for long texts."""
    folder = tmp_path_factory.mktemp("endings")
    write_files(folder)
    with serving(folder, n_ctx=16384) as one:
        yield one


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until it holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def n_aborted(served: Served) -> int:
    """Requests that were aborted so far."""
    return served.engine.stats().core.n_aborted


def test_a_time_limit_ends_it_after_a_line(http: httpx.Client) -> None:
    """t_max_predict_ms counts from the first token, and waits for a line break."""
    own = {"t_max_predict_ms": 1, "temperature": 0, "ignore_eos": True}
    body = {"prompt": "a", "grammar": 'root ::= "a\\n" [b]+', "n_predict": 15_000, **own}
    line = http.post("/completion", json=body).json()
    body = {"prompt": "a", "grammar": "root ::= [b]+", "n_predict": 50, **own}
    none = http.post("/completion", json=body).json()

    assert line["content"].startswith("a\n")  # test_timed.py: it goes on until then
    assert (line["stop_type"], line["has_new_line"]) == ("limit", True)
    assert line["tokens_predicted"] < 15_000
    assert none["tokens_predicted"] == 50


def test_a_time_limit_in_a_stream(http: httpx.Client) -> None:
    """The last words come, as after any other end."""
    body = {"prompt": "a", "grammar": 'root ::= "a\\n" [b]+', **LONG, "t_max_predict_ms": 1}
    with http.stream("POST", "/completion", json={**body, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line]

    assert (chunks[-1]["stop"], chunks[-1]["stop_type"]) == (True, "limit")
    assert len(chunks) < 15_000


def test_a_stream_that_is_left_frees_everything(http: httpx.Client, served: Served) -> None:
    """One of several prompts too: no sequence goes on for nobody."""
    before = n_aborted(served)
    body = {"prompt": ["hello", "world"], **LONG, "n_predict": 7000, "stream": True}
    with http.stream("POST", "/completion", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)

    wait_for(lambda: n_aborted(served) == before + 2)


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world"]])
def test_an_answer_that_nobody_waits_for_ends(served: Served, prompt: str | list[str]) -> None:
    """A client that goes before its whole answer is there cancels it."""
    before, address = n_aborted(served), urlsplit(served.url)
    assert address.hostname is not None
    body = json.dumps({"prompt": prompt, **LONG, "n_predict": 7000}).encode()
    n = 1 if isinstance(prompt, str) else len(prompt)
    with socket.create_connection((address.hostname, address.port or 80)) as client:
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_for(lambda: len(served.state.runs) == n)

    wait_for(lambda: n_aborted(served) == before + n)
