"""POST /api/compare: many requests of the API over one connection.

A browser opens six connections to a server, for all of its tabs together, so a page that compares
more than a few mixes cannot have a stream for each. This route carries them in one: each request
goes through the whole application as if it had come alone, with the caller's headers, and what it
answers comes out as lines of JSON:

    {"index": 0, "body": "data: {...}"}                        a piece of an answer's body
    {"index": 1, "status": 404, "error": "{\\"error\\": ...}"}     the body of one that is an error
    {"index": 0, "end": true}                                  nothing more of this one
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Scope

from loragraph.server import sse
from loragraph.server.gate import RequestId
from loragraph.server.prefix import OUTER_ROOT_KEY
from loragraph.server.routing import api_router
from loragraph.server.state import State

MAX_REQUESTS = 32
PATH = "/v1/chat/completions"
_MAX_LINES = 256  # that wait for a slow reader, before the answers wait too
_MAX_ERROR = 1 << 16  # bytes of an error's body
_KEPT = ("type", "asgi", "http_version", "scheme", "client", "server", "state")

router = api_router(include_in_schema=False)


class CompareBody(BaseModel):
    """The requests, as POST /v1/chat/completions takes them."""

    model_config = ConfigDict(extra="forbid")

    requests: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_REQUESTS)]


class LineStream(sse.EventStream):
    """Lines of JSON."""

    media_type = "application/x-ndjson"


@router.post("/api/compare")
async def compare(
    body: CompareBody, http: Request, state: State, request_id: RequestId
) -> Response:
    """Answers all requests at once; who leaves ends them all."""
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MAX_LINES)
    calls = [
        _Call(http.app, _scope(http, f"{request_id[:120]}-{index}"), index, request, lines)
        for index, request in enumerate(body.requests)
    ]
    return LineStream(_chunks(calls, lines), state.config.send_timeout_s)


class _Call:
    """One request, put through the application."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        index: int,
        request: dict[str, Any],
        lines: asyncio.Queue[dict[str, Any]],
    ) -> None:
        self._app = app
        self._scope = scope
        self._index = index
        self._body = to_json(request)
        self._lines = lines
        self._sent = False
        self._status = 0
        self._error = bytearray()
        # A piece of a body may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def run(self) -> None:
        """To the end of the answer. Cancelling it cancels the request."""
        # Of a failure the application has told, in the log and by a status of 500.
        await asyncio.gather(
            self._app(self._scope, self._receive, self._send), return_exceptions=True
        )
        if self._status != 200:
            error = bytes(self._error[:_MAX_ERROR]).decode("utf-8", "replace")
            await self._put(status=self._status or 500, error=error)
        await self._put(end=True)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await asyncio.Event().wait()  # whoever leaves cancels this
        raise AssertionError("unreachable")

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            self._error += message.get("body", b"")[: _MAX_ERROR - len(self._error)]
        else:
            text = self._decoder.decode(message.get("body", b""))
            if text:
                await self._put(body=text)

    async def _put(self, **fields: Any) -> None:
        await self._lines.put({"index": self._index, **fields})


async def _chunks(
    calls: list[_Call], lines: asyncio.Queue[dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    """What is ready goes out together, in one chunk."""
    tasks = [asyncio.ensure_future(call.run()) for call in calls]
    n_open = len(tasks)
    try:
        while n_open:
            ready = [await lines.get()]
            while not lines.empty():
                ready.append(lines.get_nowait())
            n_open -= sum("end" in line for line in ready)
            yield b"".join(to_json(line) + b"\n" for line in ready)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _scope(http: Request, request_id: str) -> Scope:
    """A request of its own to PATH, by the same caller."""
    scope = {key: http.scope[key] for key in _KEPT if key in http.scope}
    root = http.scope.get("root_path", "")
    path, outer = root + PATH, http.scope.get(OUTER_ROOT_KEY, root)
    dropped = {b"content-length", b"content-type", b"transfer-encoding", b"x-request-id"}
    headers = [pair for pair in http.scope["headers"] if pair[0] not in dropped]
    headers += [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    more = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    return {**scope, **more, "root_path": outer, "headers": headers, "extensions": {}}
