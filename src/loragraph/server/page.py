"""The page at /: its files from memory, and the routes that it alone uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import Response

from loragraph.server import compare, page_state
from loragraph.server.errors import ApiError
from loragraph.server.routing import api_router
from loragraph.server.state import ServerState

router = api_router(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Everything comes from this server, nothing is inline, and no text ever becomes markup.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def install(app: FastAPI, state: ServerState) -> None:
    """Adds the page."""
    state.hooks.append(page_state.of(state).tokens)
    for one in (router, page_state.router, compare.router):
        app.include_router(one)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/index.html", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page."""
    return _answer(request, "index.html")


@router.api_route("/favicon.ico", methods=["GET", "HEAD"])
async def icon(request: Request) -> Response:
    """The icon, for what asks for it without having read the page."""
    return _answer(request, "icon.svg")


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
async def static(request: Request, name: str) -> Response:
    """A file of the page."""
    return _answer(request, name)


@cache
def assets() -> Mapping[str, Asset]:
    """The files by name. Read once, so that a request's words never become a path."""
    found = {}
    for file in resources.files("loragraph.server").joinpath("static").iterdir():
        media_type = _TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found[file.name] = Asset(content, media_type, etag)
    return found


def _answer(request: Request, name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise ApiError(404, f"no such file: {name:.200}")
    headers = {**_HEADERS, "ETag": asset.etag}
    known = [one.strip().removeprefix("W/") for one in _list(request, "if-none-match")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


def _list(request: Request, header: str) -> list[str]:
    return request.headers.get(header, "").split(",")
