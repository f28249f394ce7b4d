"""In front of all routes: request ids, keys, origins, the limit of bodies."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loragraph.server.config import ServerConfig
from loragraph.server.errors import ApiError
from loragraph.server.prefix import route_path
from loragraph.server.routing import MAX_BODY_KEY, discard_body

PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/", "/index.html", "/favicon.ico"})
PUBLIC_PREFIXES = ("/static/",)
"""What needs no key: the page asks for one itself."""

REQUEST_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_KEY = "loragraph.is_admin"
_API_KEY = "loragraph.api_key"
_REQUEST_ID_KEY = "loragraph.request_id"


@dataclass(slots=True)
class RequestName:
    """A request's id: the client's, from header or body, or one that is made."""

    id: str = ""


def request_name(scope: Scope) -> RequestName:
    """The one of a request, which all copies of its scope share that are made later."""
    found: RequestName = scope.setdefault(_REQUEST_ID_KEY, RequestName())
    return found


class Gate:
    """ASGI middleware; refuses what must not reach a route."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._api_keys = _digests((*config.api_keys, *config.admin_keys))
        self._admin_keys = _digests(config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = request_name(scope)
        name.id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope[MAX_BODY_KEY] = self._config.max_body_bytes

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # read now, as a route may have found another in the body
                MutableHeaders(scope=message)["X-Request-Id"] = name.id
            await send(message)

        error = self._refusal(scope, headers)
        if error is None:
            await self._app(scope, receive, send_with_id)
        else:
            if error.status_code == 413 and "expect" not in headers:
                await discard_body(receive, 4 * self._config.max_body_bytes)
            await error.response_to(scope)(scope, receive, send_with_id)

    def refuses(self, scope: Scope) -> bool:
        """Whether a request would be answered here, without its body being read."""
        return self._refusal(dict(scope), Headers(scope=scope)) is not None

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        config, path, method = self._config, route_path(scope), scope["method"]
        if not self._knows_host(headers):
            return ApiError(
                403, "this server is not called by that name (Host; see --allowed-hosts)"
            )
        origin = headers.get("origin")
        if method not in _SAFE_METHODS and origin and not self._knows_origin(origin, headers):
            return ApiError(
                403, "a page of another origin may not call this server (see --cors-origin)"
            )
        key = scope[_API_KEY] = _key_of(headers)
        scope[_KEY] = not config.has_keys or _is_among(key, self._admin_keys)
        if config.has_keys and method != "OPTIONS" and not _is_public(path):
            if not key:
                return _unauthorised("expected an API key, got none")
            if not _is_among(key, self._api_keys):
                return _unauthorised("Invalid API Key", "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > config.max_body_bytes:
            return ApiError(
                413,
                f"expected a body of at most {config.max_body_bytes} bytes, got {length:.20}",
                headers={"Connection": "close"},
            )
        return None

    def _knows_host(self, headers: Headers) -> bool:
        """Whether the name that a request was sent to is one of ours.

        A page can have its own name resolve to this machine (DNS rebinding); this server is then of
        the page's origin, but the name is still the page's.
        """
        allowed = self._config.allowed_hosts
        return not allowed or "*" in allowed or _host_name(headers.get("host", "")) in allowed

    def _knows_origin(self, origin: str, headers: Headers) -> bool:
        """Whether a page of that origin may send what changes something; its own may."""
        allowed = self._config.cors_origins
        own = origin.partition("://")[2] == headers.get("host", "")
        return own or "*" in allowed or origin in allowed


def cors_options(config: ServerConfig, *exposed: str) -> dict[str, Any]:
    """Of Starlette's CORSMiddleware; `exposed`: headers that pages may read beside the id."""
    return {
        "allow_origins": config.cors_origins,
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": ["X-Request-Id", *exposed],
    }


# FastAPI has what is not async here done by a thread, for each request.


async def require_admin(request: Request) -> None:
    """403 unless the request may change the server; with any key set it takes an admin key."""
    if not request.scope.get(_KEY, False):
        raise ApiError(
            403, "this route changes the server: expected an admin key (see --admin-key)"
        )


Admin = Depends(require_admin)
"""For `dependencies=[Admin]` of routes that change the server."""


async def request_id(request: Request) -> str:
    """The id of a request, its client's own where that is usable."""
    return request_name(request.scope).id


RequestId = Annotated[str, Depends(request_id)]
"""A route's parameter for it."""


async def api_key(request: Request) -> str:
    """The key that a request brought, "" for none; whether it is a good one was checked before."""
    return str(request.scope.get(_API_KEY, ""))


ApiKey = Annotated[str, Depends(api_key)]
"""A route's parameter for it."""


def _unauthorised(message: str, reason: str | None = None) -> ApiError:
    return ApiError(401, message, reason=reason, headers={"WWW-Authenticate": "Bearer"})


def _key_of(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get("x-api-key", "")


def _host_name(host: str) -> str:
    """A Host header's name without its port; IPv6 addresses without brackets."""
    name, bracket, _ = host.removeprefix("[").partition("]")
    if not bracket:
        name = host.rpartition(":")[0] if ":" in host else host
    return name.rstrip(".").lower()


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    # Of one length, so that comparing tells nothing about a key's.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_among(key: str, digests: tuple[bytes, ...]) -> bool:
    """Compares with all, each in constant time."""
    own = _digest(key)
    return sum(hmac.compare_digest(own, other) for other in digests) > 0


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIXES)
