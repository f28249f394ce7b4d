"""The front without Ray: an ASGI application that reads requests, adds hints, and sends them on.

It has no routes of the API. It reads a body only if the replica's gate would, answers for all
replicas together where a route is about the whole, and leaves the rest to the replicas.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loragraph.cluster.catalogue import Catalogue
from loragraph.cluster.catalogue_copy import CatalogueCopy
from loragraph.errors import StaleCatalogueError
from loragraph.ray import routes
from loragraph.ray.figures import merged_metrics, replicas_json
from loragraph.ray.forward import Forwarded, Forwarder, ReplicaLostError
from loragraph.ray.hint import Hint, hint_of
from loragraph.ray.running import plain_scope
from loragraph.server.config import ServerConfig
from loragraph.server.errors import ApiError
from loragraph.server.gate import Gate, cors_options
from loragraph.server.health import not_ready
from loragraph.server.metrics import CONTENT_TYPE
from loragraph.server.prefix import route_path
from loragraph.server.routing import discard_body, parse_json
from loragraph.server.state import Phase

MAX_HEADER_BYTES = 64 * 1024
_BIG = 1 << 15  # bytes from which on parsing leaves the event loop
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

AskAll = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Member.figures() of every replica that answers."""


class Front:
    """The application. `forwarder`, `copy` and `ask_all` reach the replicas and the catalogue."""

    def __init__(
        self, config: ServerConfig, forwarder: Forwarder, copy: CatalogueCopy, ask_all: AskAll
    ) -> None:
        self._config = config
        self._forwarder = forwarder
        self._copy = copy
        self._ask_all = ask_all
        self._started = int(time.time())
        self._gate = Gate(self._whole, config)
        self._app: ASGIApp = self._requests
        if config.cors_origins:  # of what is answered here too, refusals among it
            self._app = CORSMiddleware(
                self._requests, **cors_options(config, routes.REPLICA_HEADER)
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        send = _without_request_id(send)
        await self._app(scope, receive, send)

    async def _requests(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES:
            error = ApiError(431, f"expected headers of at most {MAX_HEADER_BYTES} bytes")
            await error.response(scope, receive, send)
            return
        root, path = self._split(scope)
        if path in routes.WHOLE and scope["method"] in ("GET", "HEAD"):
            await self._gate({**scope, "root_path": root}, receive, send)
        else:
            await self._send_on(scope, path, receive, send)

    def _split(self, scope: Scope) -> tuple[str, str]:
        """What a path begins with, of an ASGI server and of --api-prefix; the rest of it.

        What is outside of the prefix is no route of the whole; the replicas say 404.
        """
        path, root, prefix = route_path(scope), scope.get("root_path", ""), self._config.api_prefix
        if not prefix:
            return root, path
        inside = path.startswith(f"{prefix}/")
        return (root + prefix, path[len(prefix) :]) if inside else (root, "")

    async def _send_on(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        plain = plain_scope(scope)
        plain["headers"] = list(scope["headers"])
        headers = MutableHeaders(scope=plain)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        headers["x-request-id"] = request_id
        try:
            body = await self._body(scope, receive)
            parsed = await _parsed(scope, body)
            catalogue = await self._copy.current()
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        except StaleCatalogueError as error:
            await ApiError(503, error.message).response(scope, receive, send)
            return
        hint = self._hint(path, request_id, parsed, catalogue)
        wanted = headers.get(routes.REPLICA_HEADER, "")
        if wanted:
            hint = replace(hint, prefer=wanted)
        await self._forwarder.serve(Forwarded(plain, path, body, parsed, hint), receive, send)

    def _hint(self, path: str, request_id: str, parsed: Any, catalogue: Catalogue) -> Hint:
        word = routes.sticky_word(path)
        if word:
            return Hint(request_id, catalogue.version, sticky=word)
        return hint_of(request_id, parsed, catalogue, self._config.aliases)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The body, or b"" of a request that the replica's gate refuses without reading it.

        ApiError for one above the limit.
        """
        if self._gate.refuses(scope):
            return b""
        limit = self._config.max_body_bytes
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the connection ended within the body")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > limit:
                await discard_body(receive, 4 * limit)
                raise ApiError(
                    413,
                    f"expected a body of at most {limit} bytes, got more",
                    headers={"Connection": "close"},
                )
        return b"".join(chunks)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Routes about all replicas; the gate has let the request in."""
        try:
            response = await self._answer(Request(scope))
        except ApiError as error:
            response = error.response
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = route_path(request.scope)
        if path in (routes.METRICS, routes.REPLICA_METRICS) and not self._config.with_metrics:
            raise ApiError(
                501, "This server does not support metrics endpoint. Start it with `--metrics`"
            )
        try:
            found = await self._ask_all()
        except ReplicaLostError as error:
            raise ApiError(503, error.message, phase="loading") from error
        if path == routes.REPLICAS:
            return JSONResponse({"replicas": replicas_json(found)})
        if path in routes.HEALTH:
            if not any(one["status"] == "ready" for one in found):
                draining = any(one["status"] == "draining" for one in found)
                raise not_ready(Phase.DRAINING if draining else Phase.LOADING)
            return JSONResponse({"status": "ok"})
        text = merged_metrics(
            {one["id"]: one["metrics"] for one in found},
            self._forwarder.counts,
            self._copy.version,
            by_replica=path == routes.REPLICA_METRICS,
        )
        headers = {"Process-Start-Time-Unix": str(self._started)}
        return Response(text, headers=headers, media_type=CONTENT_TYPE)


async def _parsed(scope: Scope, body: bytes) -> Any:
    """The body as JSON values; None for what is none: the replica says what is wrong with it."""
    if scope["method"] != "POST" or not body:
        return None
    try:
        return await asyncio.to_thread(parse_json, body) if len(body) > _BIG else parse_json(body)
    except ApiError:
        return None


def _without_request_id(send: Send) -> Send:
    """Serve's proxy adds the id to every answer, so ours would be there twice."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
            message = {**message, "headers": headers}
        await send(message)

    return sending


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
