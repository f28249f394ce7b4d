"""Bodies of requests: bounded, parsed off the event loop, whatever their content type says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from loragraph.server.errors import ApiError

_DISCARD_S = 3.0
_BIG = 1 << 15  # bytes from which on parsing leaves the event loop
MAX_BODY_KEY = "loragraph.max_body_bytes"
"""Where the gate leaves the limit in the scope."""


def parse_json(data: bytes) -> Any:
    """JSON from outside; 400 for invalid UTF-8, NaN, and nesting beyond 200 levels."""
    try:
        return from_json(data, allow_inf_nan=False, cache_strings=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error) or 'too deeply nested'}") from error


async def discard_body(receive: Receive, n_most: int) -> None:
    """Reads the rest of a body that is refused, within bounds.

    A connection that is closed while its client still sends is reset, and the answer may be lost.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while n_most > 0:
                message = await receive()
                n_most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class JsonRequest(Request):
    """A request whose body is JSON or nothing."""

    async def body(self) -> bytes:
        """The body; 413 for one above the limit, without reading it to the end."""
        if not hasattr(self, "_body"):
            limit = self.scope.get(MAX_BODY_KEY, 1 << 20)
            chunks, size = [], 0
            try:
                async for chunk in self.stream():
                    size += len(chunk)
                    if size > limit:
                        await discard_body(self.receive, 4 * limit)
                        raise ApiError(
                            413,
                            f"expected a body of at most {limit} bytes, got more",
                            headers={"Connection": "close"},
                        )
                    chunks.append(chunk)
            except ClientDisconnect as error:
                raise ApiError(400, "the connection ended within the body") from error
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """The parsed body."""
        data = await self.body()
        return await asyncio.to_thread(parse_json, data) if len(data) > _BIG else parse_json(data)


class JsonRoute(APIRoute):
    """A route that takes JSON under any content type, as llama-server does.

    Which pages of which origins may send it is the gate's matter, not the content type's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, on our requests."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            scope = dict(request.scope)
            scope["headers"] = list(scope["headers"])
            MutableHeaders(scope=scope)["content-type"] = "application/json"
            return await handler(JsonRequest(scope, request.receive))

        return handle


def api_router(**options: Any) -> APIRouter:
    """A router for JSON routes; use it for every route that reads a body."""
    return APIRouter(route_class=JsonRoute, **options)


def own_version() -> str:
    """The version of this program, for documents and fingerprints."""
    try:
        return metadata.version("loragraph")
    except metadata.PackageNotFoundError:  # run from its folder, without being installed
        return "0"
