"""An application run for one request, as batches of its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loragraph.ray.running import MAX_WAITING, plain_scope, run_app

SCOPE: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}


def piece(body: bytes, *, more: bool = True) -> Message:
    """A piece of a body."""
    return {"type": "http.response.body", "body": body, "more_body": more}


async def all_of(app: ASGIApp) -> list[Message]:
    """Its messages."""
    return [message async for batch in run_app(app, SCOPE, b"body") for message in batch]


def test_messages_come_in_order_and_together() -> None:
    """What is ready is one batch."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"body"
        for n in range(3):
            await send(piece(b"%d" % n))
        await asyncio.sleep(0)
        await send(piece(b"end", more=False))

    async def run() -> list[int]:
        return [len(batch) async for batch in run_app(app, SCOPE, b"body")]

    assert [message["body"] for message in asyncio.run(all_of(app))] == [b"0", b"1", b"2", b"end"]
    assert asyncio.run(run()) == [3, 1]


def test_a_failure_ends_the_messages() -> None:
    """The application told it, or its answer has no end."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(piece(b"x"))
        raise ValueError("wrong")

    assert asyncio.run(all_of(app)) == [piece(b"x")]


async def closed_early(app: ASGIApp) -> None:
    """Reads one batch, and leaves."""
    batches = run_app(app, SCOPE, b"")
    await anext(batches)
    await batches.aclose()


def test_leaving_is_told_to_the_application() -> None:
    """By http.disconnect, after the body; it may end in its own way."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(piece(b"x"))
        while (message := await receive())["type"] != "http.disconnect":
            seen.append(message["type"])
        await send(piece(b"to nobody"))
        seen.append("left")

    asyncio.run(closed_early(app))

    assert seen == ["http.request", "left"]


def test_an_application_that_does_not_leave_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time."""
    monkeypatch.setattr("loragraph.ray.running._LEAVE_S", 0.01)
    cancelled = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(piece(b"x"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.run(closed_early(app))

    assert cancelled == [True]


def test_a_slow_reader_holds_the_application_up() -> None:
    """No more than so many messages wait for it; leaving lets go."""
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for n in range(10 * MAX_WAITING):
            await send(piece(b"x"))
            sent.append(n)

    async def run(then: Callable[[], Awaitable[None]]) -> None:
        batches = run_app(app, SCOPE, b"")
        await anext(batches)
        for _ in range(20 * MAX_WAITING):
            await asyncio.sleep(0)
        assert len(sent) <= 2 * MAX_WAITING
        await batches.aclose()
        await then()

    async def nothing() -> None:
        assert len(sent) == 10 * MAX_WAITING

    asyncio.run(run(nothing))


def test_a_scope_travels_without_what_cannot() -> None:
    """Its application and state stay."""
    scope = {**SCOPE, "app": object(), "state": {}, "client": ("127.0.0.1", 5)}
    assert plain_scope(scope) == {**SCOPE, "client": ("127.0.0.1", 5)}
