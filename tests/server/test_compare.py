"""Many requests over one connection."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server.compare import MAX_REQUESTS
from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving

MESSAGES = [{"role": "user", "content": "Why?"}]
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 9, "stream": True}


def mixed(**scales: float) -> dict[str, Any]:
    """A request with that mix."""
    return {**GREEDY, "lora": [{"name": name, "scale": scale} for name, scale in scales.items()]}


def lines(http: httpx.Client, requests: list[Any]) -> list[dict[str, Any]]:
    """The lines of an answer."""
    answer = http.post("/api/compare", json={"requests": requests})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def body(found: list[dict[str, Any]], index: int) -> str:
    """One answer's body, put together."""
    return "".join(line.get("body", "") for line in found if line["index"] == index)


def text(events: str) -> str:
    """The text of a stream of chunks."""
    chunks = [
        json.loads(event.removeprefix("data: "))
        for event in events.strip().split("\n\n")
        if event != "data: [DONE]"
    ]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_each_request_is_answered_as_if_alone(http: httpx.Client) -> None:
    """Bodies, put together, are the streams that the requests get by themselves."""
    requests = [mixed(), mixed(alpha=1.0), mixed(alpha=0.5, beta=0.5), mixed()]
    found = lines(http, requests)

    for index, request in enumerate(requests):
        alone = http.post("/v1/chat/completions", json=request)
        assert text(body(found, index)) == text(alone.text)
        assert body(found, index).endswith("data: [DONE]\n\n")
        assert [line for line in found if line["index"] == index][-1] == {
            "index": index,
            "end": True,
        }


def test_they_run_in_one_batch(http: httpx.Client, served: Served) -> None:
    """Four requests take fewer steps together than the 36 of one after the other."""
    requests = [mixed(), mixed(alpha=1.0), mixed(beta=1.0), mixed(gamma=1.0)]
    lines(http, requests)  # adapters are in memory from now on
    before = served.engine.stats().core.n_steps
    lines(http, requests)
    steps = served.engine.stats().core.n_steps - before

    assert steps < 30  # they arrive one by one, on a busy machine some steps apart


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({**GREEDY, "lora": [{"name": "nobody", "scale": 1}]}, 404),
        ({**GREEDY, "lora": [{"name": "alpha", "scale": "x"}]}, 400),
        ({**GREEDY, "messages": "x"}, 400),
        ({}, 400),
    ],
)
def test_a_wrong_request_is_its_own_error(
    http: httpx.Client, request_: dict[str, Any], status: int
) -> None:
    """It gets the status and body that it would get alone; the others are answered."""
    found = lines(http, [mixed(), request_])
    (error,) = (line for line in found if "error" in line)

    alone = http.post("/v1/chat/completions", json=request_)
    assert (error["index"], error["status"]) == (1, alone.status_code) == (1, status)
    assert json.loads(error["error"]) == alone.json()
    assert text(body(found, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"requests": []},
        {"requests": [1]},
        {"requests": {}},
        {"requests": [{}], "more": 1},
        {"requests": [{}] * (MAX_REQUESTS + 1)},
        [],
        None,
    ],
)
def test_a_wrong_bundle_is_refused(http: httpx.Client, wrong: Any) -> None:
    """400 before anything is asked."""
    answer = http.post("/api/compare", json=wrong)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_words_of_any_script_go_through(http: httpx.Client) -> None:
    """Text is neither changed nor grown on its way: what a request may hold alone, it may here."""
    words = 'é漢字🙂 \\u0041 "' * 3
    request = {**mixed(), "messages": [{"role": "user", "content": words}]}

    alone = http.post("/v1/chat/completions", json={**request, "stream": False}).json()
    found = lines(http, [request, {**request, "stream": False}])

    assert text(body(found, 0)) == alone["choices"][0]["message"]["content"]
    again = json.loads(body(found, 1))
    assert again["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert again["choices"] == alone["choices"]


def test_who_leaves_ends_all_requests(http: httpx.Client, served: Served) -> None:
    """A connection that is closed within the answer leaves nothing running."""
    before = served.engine.stats().core
    requests = [{**mixed(alpha=1.0), "max_tokens": 450}] * 3
    with http.stream("POST", "/api/compare", json={"requests": requests}) as answer:
        lines_ = answer.iter_lines()  # dropping it would close the connection
        next(lines_)
        until(lambda: served.engine.stats().core.n_submitted == before.n_submitted + 3)
    until(lambda: served.engine.stats().core.n_jobs == 0)

    assert served.engine.stats().core.n_aborted == before.n_aborted + 3


def until(holds: Callable[[], bool]) -> None:
    """Waits for what happens in the server."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_does_not_read_is_cut_off(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes nothing in holds nobody up: after the time for sending all is ended."""
    request = {**mixed(), "max_tokens": 450, "logprobs": True, "top_logprobs": 20}  # much to send
    data = json.dumps({"requests": [request] * MAX_REQUESTS}).encode()
    with (
        serving(served.folder, ServerConfig(send_timeout_s=0.5)) as one,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(one.url.rpartition(":")[2])))
        head = f"POST /api/compare HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        until(lambda: any("is cut off" in message for message in caplog.messages))
        until(lambda: one.engine.stats().core.n_jobs == 0 and not one.state.runs)

        with one.client() as http:  # others are served
            assert text(body(lines(http, [mixed(alpha=1.0)]), 0))


def test_keys_and_ids_go_through(served: Served) -> None:
    """Each request carries the caller's key, and an id made of the caller's."""
    with (
        serving(served.folder, ServerConfig(api_keys=("secret",))) as one,
        one.client("secret") as http,
    ):
        http.headers["X-Request-Id"] = "mine"
        found = lines(http, [mixed(), mixed(alpha=1.0)])
        assert '"chatcmpl-mine-0"' in body(found, 0)
        assert '"chatcmpl-mine-1"' in body(found, 1)
