"""Server-sent events: one response that ends when its client goes or stops reading."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loragraph.errors import LoragraphError
from loragraph.server.errors import ApiError, api_error

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
CHUNKS_KEY = "loragraph.chunks"
"""Where a connection's ChunkWriter stands among the extensions of a request's scope, if it has one.
"""

ChunkWriter = Callable[[bytes], bool]
"""Sends bytes of an answer that has begun, without Content-Length, and has not ended.

False where they have to be sent as ASGI has it instead, since that may have to wait.
"""

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + encoded(value) + b"\n\n"


class Chunks:
    """Events that begin with the same fields, which are encoded once."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._start = b"data: " + encoded(head)[:-1] + b","

    def data(self, **fields: Any) -> bytes:
        """One event of the common fields and these."""
        return self._start + encoded(fields)[1:] + b"\n\n"

    def form(self, choice: Mapping[str, Any]) -> TextForm:
        """The event of one choice, in which a MARK stands for the text that is still to come."""
        return TextForm(self._start + encoded({"choices": [choice]})[1:] + b"\n\n")


MARK = "\u0000text\u0000"


class TextForm:
    """An event that is encoded but for a text, where MARK stands."""

    def __init__(self, event: bytes) -> None:
        self._head, mark, self._tail = event.partition(encoded(MARK))
        assert mark, "the event has no mark"

    def of(self, text: str) -> bytes:
        """The event with a text."""
        return b"%b%b%b" % (self._head, encoded(text), self._tail)


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; numbers that are not finite are null."""
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        # A lone half of a surrogate pair, which only a client's own words can hold, is no UTF-8.
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class EventStream(Response):
    """Sends what a generator makes; see `event_stream`."""

    media_type = "text/event-stream"
    comment = b":\n\n"
    """What goes out where nothing else does for long: clients pass over it."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        send_timeout_s: float,
        *,
        ping_s: float = math.inf,
        first: asyncio.Task[bytes] | None = None,
        end: bytes = b"",
    ) -> None:
        """`first`: the first chunk, which may have been asked for already; `end`: the last one.

        A client that reads nothing for `send_timeout_s` is cut off; no silence is over `ping_s`.
        """
        self._chunks = chunks
        self._first = first
        self._end = end
        self._timeout_s = send_timeout_s
        self._ping_s = ping_s
        self._sending = False
        self._moved = 0.0  # when the last send began, on the loop's clock
        self._write: ChunkWriter | None = None
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end, or until the client is gone; the generator is closed either way."""
        self._write = (scope.get("extensions") or {}).get(CHUNKS_KEY)
        pump = asyncio.ensure_future(self._pump(scope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        watch = asyncio.ensure_future(self._watch(send))
        try:
            await asyncio.wait({pump, gone, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            slow = watch.done() and not pump.done()
            for task in (pump, gone, watch):
                task.cancel()
            await asyncio.gather(pump, gone, watch, return_exceptions=True)
        if slow:  # without an end to the answer the connection is closed
            _log.warning("a client read nothing for %g s: its stream is cut off", self._timeout_s)
        elif not pump.cancelled():
            pump.result()

    async def _pump(self, scope: Scope, send: Send) -> None:
        clock, write = asyncio.get_running_loop().time, self._write
        async with aclosing(self._chunks):
            self._moved = clock()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            end = self._end
            try:
                if self._first is not None:
                    await self._put(send, await self._first)
                async for chunk in self._chunks:
                    self._moved = clock()
                    if write is None or not write(chunk):
                        await self._put(send, chunk)
            except ApiError as error:
                end = data(error.body_to(scope)) + end
            except LoragraphError as error:
                end = data(api_error(error).body_to(scope)) + end
            finally:
                if self._first is not None:  # before the generator can be closed
                    self._first.cancel()
                    await asyncio.gather(self._first, return_exceptions=True)
            await self._put(send, end, more=False)

    async def _put(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._moved = asyncio.get_running_loop().time()
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False

    async def _watch(self, send: Send) -> None:
        """Breaks silences; returns once a send has taken too long.

        One for the stream, since a timeout for each chunk costs a third of what sending it does.
        """
        loop = asyncio.get_running_loop()
        while True:
            limit = self._timeout_s if self._sending else self._ping_s
            left = self._moved + limit - loop.time() if self._moved else self._timeout_s
            if left > 0:  # a send that begins meanwhile is not late before this wakes again
                await asyncio.sleep(min(left, self._timeout_s))
            elif self._sending:
                return
            else:
                try:  # not wait_for(), which loses a cancellation that comes as the send ends
                    async with asyncio.timeout(self._timeout_s):
                        await self._put(send, self.comment)
                except TimeoutError:
                    return


async def event_stream(
    chunks: AsyncGenerator[bytes, None],
    send_timeout_s: float,
    end: bytes = DONE,
    *,
    ping_s: float = math.inf,
) -> EventStream:
    """A response of a generator's chunks, and then `end`.

    Waits for the first, so that what is wrong with a request is an error with its own status, but
    no longer than `ping_s`: then the answer begins with a comment, since proxies cut connections
    that are silent. An error after that is an event of its own, with the error's body, and ends
    the stream.
    """
    first = asyncio.ensure_future(_first(chunks))
    try:
        await asyncio.wait({first}, timeout=None if ping_s == math.inf else ping_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        raise
    return EventStream(chunks, send_timeout_s, ping_s=ping_s, first=first, end=end)


async def _first(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks, b"")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
