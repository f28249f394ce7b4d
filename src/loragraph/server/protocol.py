"""uvicorn's HTTP/1.1 protocol, with a short way out for the chunks of a stream.

Requests are read by h11, with its bounds, and heads and ends of answers are written by it. A chunk
between them is its length and its bytes, whatever came before it; the way through all middlewares,
uvicorn and h11 takes longer than all else that is done for a token.
"""

from __future__ import annotations

from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from loragraph.server.sse import CHUNKS_KEY, ChunkWriter


class StreamProtocol(H11Protocol):
    """A connection whose answers offer a ChunkWriter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = cast(ASGIApp, self.app)

        async def offering(scope: Scope, receive: Receive, send: Send) -> None:
            # For these alone h11 has an answer without Content-Length in chunks.
            if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                extensions = scope.get("extensions") or {}
                scope["extensions"] = {**extensions, CHUNKS_KEY: _writer(self.cycle)}
            await app(scope, receive, send)

        self.app = cast(Any, offering)

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP. Where an answer has begun before that, there is no other one."""
        if self.cycle is not None and self.cycle.response_started and self.cycle.more_body:
            self.transport.close()
        else:
            super().send_400_response(msg)


def _writer(cycle: RequestResponseCycle) -> ChunkWriter:
    """For the answer to one request; a connection has one at a time."""
    flow, write = cycle.flow, cycle.transport.write

    def put(body: bytes) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        if not cycle.response_started or cycle.response_complete:
            return False
        if body:  # an empty chunk would be the last
            write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return put
