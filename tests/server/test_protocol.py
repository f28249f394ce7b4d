"""The server's HTTP protocol: what it sends is what ASGI's way would send; h11's bounds hold."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from loragraph.server import sse
from loragraph.server.protocol import _writer
from tests.server.serving import listening

BODIES = [b"a", b"", b"\r\n0\r\n\r\n", b"x" * 70_000, b"data: b\n\n"]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream of BODIES; at /plain without the short way."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/plain":
        scope["extensions"].pop(sse.CHUNKS_KEY, None)
    if scope["path"] == "/told":
        told = b"%d" % (sse.CHUNKS_KEY in (scope.get("extensions") or {}))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": told})
        return

    async def chunks() -> AsyncGenerator[bytes, None]:
        for body in BODIES:
            yield body
            await asyncio.sleep(0)

    await (await sse.event_stream(chunks(), 60))(scope, receive, send)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where it listens."""
    with listening(application) as (url, _):
        yield int(url.rpartition(":")[2])


def answer_to(port: int, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for part in parts:
            try:
                sock.sendall(part)
            except OSError:  # it has closed already
                break
        data = b""
        try:
            while more := sock.recv(1 << 16):
                data += more
        except ConnectionResetError:
            pass
        return data


def get(path: str, *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    """A request that ends its connection."""
    lines = [f"{method} {path} HTTP/{version}", "Host: x", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def body_of(answer: bytes) -> bytes:
    """The body, out of its chunks."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        body, end, rest = body + rest[:n], rest[n : n + 2], rest[n + 2 :]
        assert end == b"\r\n"
        if n == 0:
            assert rest == b""
            return body


def test_chunks_are_those_of_asgi(port: int) -> None:
    """Empty ones are left out, and what looks like an end is none; the end is h11's."""
    short, plain = answer_to(port, get("/")), answer_to(port, get("/plain"))

    assert body_of(short) == body_of(plain) == b"".join(BODIES) + sse.DONE


def test_a_connection_serves_several_streams(port: int) -> None:
    """Each request has a way of its own; pipelined ones are answered in turn."""
    first = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    answer = answer_to(port, first + first + get("/"))

    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.count(b"".join(BODIES[-1:])) == 3


@pytest.mark.parametrize(
    ("version", "method", "offered"), [("1.1", "GET", b"1"), ("1.0", "GET", b"0")]
)
def test_who_gets_chunks(port: int, version: str, method: str, offered: bytes) -> None:
    """HTTP/1.0 knows none."""
    answer = answer_to(port, get("/told", version=version, method=method))

    assert offered in answer.partition(b"\r\n\r\n")[2]


def test_http_1_0_gets_its_stream_unchunked(port: int) -> None:
    """It ends with the connection."""
    head, _, body = answer_to(port, get("/", version="1.0")).partition(b"\r\n\r\n")

    assert b"chunked" not in head.lower()
    assert body == b"".join(BODIES) + sse.DONE


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n", *[b"a: " + b"b" * 4096 + b"\r\n"] * 16),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", *[b"a: b\r\n" * 600] * 16),
        (b"GET /", *[b"a" * 4096] * 16),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: ", *[b"b" * 4096] * 16),
    ],
    ids=["large headers", "many headers", "a long path", "one long header"],
)
def test_heads_are_bounded(port: int, parts: tuple[bytes, ...]) -> None:
    """A head that does not end is refused once it is longer than the bound; others are served."""
    answer = answer_to(port, *parts)

    assert b"200" not in answer.partition(b"\r\n")[0]
    assert b"HTTP/1.1 200" in answer_to(port, get("/"))


def test_a_long_chunk_size_after_the_answer_began(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends; it was an error in the log, since no second answer can be sent."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"

    answer_to(port, head, *[b"e" * 4096] * 16)

    assert b"HTTP/1.1 200" in answer_to(port, get("/"))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: b\0c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"G\xc3\xa9T / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_heads_that_are_no_http(port: int, head: bytes) -> None:
    """400, and the end of the connection."""
    answer = answer_to(port, head + b"\r\n" * 2)

    assert answer.startswith(b"HTTP/1.1 400")


def test_a_writer_gives_way() -> None:
    """It sends nothing before an answer has begun, after its end, or while the client is slow."""
    sent: list[bytes] = []
    cycle: Any = SimpleNamespace(
        flow=SimpleNamespace(write_paused=False),
        transport=SimpleNamespace(write=sent.append),
        disconnected=False,
        response_started=True,
        response_complete=False,
    )
    put = _writer(cycle)

    assert put(b"abc")
    assert put(b"")
    for name, value in (("response_started", False), ("response_complete", True)):
        setattr(cycle, name, value)
        assert not put(b"no")
        setattr(cycle, name, not value)
    cycle.disconnected = True
    assert not put(b"no")
    cycle.disconnected, cycle.flow.write_paused = False, True
    assert not put(b"no")
    assert sent == [b"3\r\nabc\r\n"]
