"""Server-sent events: one response that ends when its client goes or stops reading."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loragraph.errors import LoragraphError
from loragraph.server.errors import ApiError, api_error

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
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


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; numbers that are not finite are null."""
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        # A lone half of a surrogate pair, which only a client's own words can hold, is no UTF-8.
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class EventStream(Response):
    """Sends what a generator makes. Made by `event_stream`."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], send_timeout_s: float) -> None:
        self._chunks = chunks
        self._timeout_s = send_timeout_s
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end, or until the client is gone; the generator is closed either way."""
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
        if pump.cancelled():
            return
        try:
            pump.result()
        except TimeoutError:  # without an end to the answer the connection is closed
            _log.warning("a client read nothing for %g s: its stream is cut off", self._timeout_s)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                message = {"type": "http.response.body", "body": chunk, "more_body": True}
                # not wait_for(), which loses a cancellation that comes as the send ends
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def event_stream(
    chunks: AsyncGenerator[bytes, None], send_timeout_s: float, end: bytes = DONE
) -> EventStream:
    """A response of a generator's chunks, and then `end`.

    Waits for the first, so that what is wrong with a request is an error with its own status. An
    error after that is an event of its own, with the error's body, and ends the stream.
    """
    try:
        first = await anext(chunks, b"")
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(_guarded(first, chunks, end), send_timeout_s)


async def _guarded(
    first: bytes, chunks: AsyncGenerator[bytes, None], end: bytes
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        except ApiError as error:
            yield data(error.body)
        except LoragraphError as error:
            yield data(api_error(error).body)
        yield end


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
