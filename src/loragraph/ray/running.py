"""The replica's half of a request: an ASGI application's messages for it, in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope

MAX_WAITING = 64
"""Messages that wait to be read before the application waits too."""

_LEAVE_S = 10.0
_PLAIN = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client", "server"),
)


def plain_scope(scope: Scope) -> Scope:
    """What of a scope may travel to another process."""
    return {key: scope[key] for key in _PLAIN if key in scope}


async def run_app(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
    """What the application sends, as many messages in a batch as are ready.

    Closing it tells the application that its client is gone, and waits for its end.
    """
    exchange = _Exchange(body)
    # Its own: an application writes into it.
    task = asyncio.ensure_future(app({**scope, "extensions": {}}, exchange.receive, exchange.send))
    task.add_done_callback(lambda _: exchange.finish())
    try:
        while batch := await exchange.batch():
            yield batch
        # A failure has been told and logged by the application, or its answer has no end.
        await asyncio.gather(task, return_exceptions=True)
    finally:
        exchange.leave()
        if not task.done():
            await asyncio.wait({task}, timeout=_LEAVE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Exchange:
    """Between an application and who reads what it sends."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._messages: deque[Message] = deque()
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._gone = asyncio.Event()
        self._finished = False
        self._room.set()

    async def receive(self) -> Message:
        """The body as one piece, and then, one day, the client's leaving."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Waits while too much waits to be read, unless nobody reads any more."""
        await self._room.wait()
        if self._gone.is_set():
            return
        self._messages.append(message)
        self._ready.set()
        if len(self._messages) >= MAX_WAITING:
            self._room.clear()

    async def batch(self) -> list[Message]:
        """All that is there, once there is something; [] after the end."""
        while not self._messages:
            if self._finished:
                return []
            self._ready.clear()
            await self._ready.wait()
        batch = list(self._messages)
        self._messages.clear()
        self._room.set()
        return batch

    def finish(self) -> None:
        """The application has ended."""
        self._finished = True
        self._ready.set()

    def leave(self) -> None:
        """Nobody reads any more."""
        self._gone.set()
        self._room.set()
