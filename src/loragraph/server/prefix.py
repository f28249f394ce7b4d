"""--api-prefix: all routes below one path, as llama-server has it, for proxies that pass it on.

Whatever prefix a request came under, an ASGI server's or ours, stands in the scope's `root_path`,
and `path` begins with it; what routes look at is the rest.
"""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from loragraph.server.errors import ApiError

OUTER_ROOT_KEY = "loragraph.outer_root_path"
"""Where the `root_path` stands that a request had before it came through here."""


class ApiPrefix:
    """ASGI middleware; 404 for what is outside of the prefix."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix` begins with a slash and does not end with one."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, prefix, root = route_path(scope), self._prefix, scope.get("root_path", "")
        if path.startswith(f"{prefix}/"):
            inner = {**scope, "root_path": root + prefix, OUTER_ROOT_KEY: root}
            await self._app(inner, receive, send)
        elif path == prefix and scope["method"] in ("GET", "HEAD"):
            # The page's addresses are relative, and so is this one: a proxy may have cut some.
            last = prefix.rpartition("/")[2]
            await RedirectResponse(f"{last}/")(scope, receive, send)
        else:
            message = f"no such route: {scope['method']} {path:.200}; all are below {prefix}/"
            await ApiError(404, message).response(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path without the prefix that the request came under."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    inside = path.startswith(f"{root}/")
    return path[len(root) :] if root and inside else path
