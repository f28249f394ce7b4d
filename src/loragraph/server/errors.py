"""Errors as HTTP answers, in one shape for OpenAI's and llama-server's clients.

    {"error": {"code": 404, "type": "not_found_error", "message": ..., "param": ..., "reason": ...}}

`code` is the status, as in llama-server and vLLM, and `type` one of llama-server's words; `param`
is OpenAI's, and `reason` its string code where it has one. On OpenAI's routes `code` is that string
too, which its clients compare; where there is none, the status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import Scope

from loragraph.errors import (
    AdapterChangedError,
    BackendError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    LifecycleError,
    LoragraphError,
    RequestError,
    SourceError,
    StaleCatalogueError,
)

_log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    502: "upstream_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_WITH_STATUS = (
    AdapterChangedError,
    BackendError,
    CapacityError,
    DeadlineError,
    SourceError,
    StaleCatalogueError,
)
_OPENAI_TAGS = frozenset(("openai", "models"))
_OPENAI_PATHS = ("/chat/completions", "/v1/completions", "/v1/embeddings", "/models")
_RETRY_AFTER = {"Retry-After": "1"}
_MAX_MESSAGE = 2000
_FOLDERS = re.compile(r"(?<![\w.:/~-])/(?:[^/\s:'\",]+/)+")  # of an absolute path
# pydantic's names for members of a union: list[int], constrained-str, NamedTool, bool
_UNION_MEMBER = re.compile(r"[\[(]|^(?:str|int|float|bool|dict|list|constrained-\w+|[A-Z]\w*)$")


class ErrorBody(BaseModel):
    """What is wrong; some errors have further fields."""

    model_config = ConfigDict(extra="allow")

    code: int | str  # a status, or on OpenAI's routes its string where it has one
    type: str
    message: str
    param: str | None = None
    reason: str | None = None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error; for the OpenAPI document."""

    error: ErrorBody


class ApiError(HTTPException):
    """An answer that is an error, with the fields of its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        reason: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """`kind`: the type, where it is not the status's own; `more`: further fields."""
        if status in (429, 503):
            headers = {**_RETRY_AFTER, **(headers or {})}
        super().__init__(status, message, dict(headers) if headers else None)
        self.message = message
        self.body: dict[str, Any] = {
            "error": {
                "code": status,
                "type": kind or _TYPES.get(status, "invalid_request_error"),
                "message": message[:_MAX_MESSAGE],
                "param": param or None,
                **({"reason": reason} if reason else {}),
                **more,
            }
        }

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status_code, self.headers)

    def response_to(self, scope: Scope) -> JSONResponse:
        """The answer to a request; see body_to()."""
        return JSONResponse(self.body_to(scope), self.status_code, self.headers)

    def body_to(self, scope: Scope) -> dict[str, Any]:
        """The body, with OpenAI's string as `code` where its routes are asked."""
        error = self.body["error"]
        if "reason" not in error or not _is_openai(scope):
            return self.body
        return {"error": {**error, "code": error["reason"]}}


def _is_openai(scope: Scope) -> bool:
    """Whether a request is for one of OpenAI's routes; by its path where no route was looked up."""
    route = scope.get("route")
    if route is not None:
        return not _OPENAI_TAGS.isdisjoint(getattr(route, "tags", ()))
    path = str(scope.get("path", ""))
    return path.endswith(_OPENAI_PATHS) or "/v1/models/" in path


def api_error(error: LoragraphError) -> ApiError:
    """The one mapping of our errors to statuses and bodies."""
    message = _without_folders(error)
    if isinstance(error, ContextLengthError):
        return ApiError(
            400,
            message,
            param=error.param,
            kind="exceed_context_size_error",
            reason=error.code,
            n_prompt_tokens=error.n_prompt_tokens,
            n_ctx=error.n_ctx,
        )
    if isinstance(error, RequestError):
        reason = None if error.code == "invalid_request_error" else error.code
        return ApiError(error.status, message, param=error.param, reason=reason)
    if isinstance(error, _WITH_STATUS):
        return ApiError(error.status, message)
    if isinstance(error, LifecycleError):
        return ApiError(503, message)
    if isinstance(error, ConfigError):
        return ApiError(400, message, param=error.field)
    return ApiError(400, message)  # a file, or what it asks for, is at fault


@contextmanager
def fields_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors name the fields that were sent; `names`: those by the engine's names of them."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param, error.param)
        raise


def _without_folders(error: LoragraphError) -> str:
    """The message with files' names alone: where a server keeps them is nobody's business."""
    text = str(error)
    for path in (getattr(error, "path", ""), getattr(error, "adapter", "")):
        if isinstance(path, str) and "/" in path:
            text = text.replace(path, path.rsplit("/", 1)[-1])
    return _FOLDERS.sub("", text)


def install(app: FastAPI) -> None:
    """Has an application answer every error in this shape."""

    @app.exception_handler(LoragraphError)
    async def known(request: Request, error: LoragraphError) -> JSONResponse:
        return api_error(error).response_to(request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response_to(request.scope)
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"no such route: {request.method} {request.url.path:.200}"
        elif error.status_code == 405:
            detail = f"{request.method} is not a method of {request.url.path:.200}"
        return ApiError(error.status_code, detail, headers=error.headers).response

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError(500, "internal error: the server's log tells more").response


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """400 for what pydantic found, the first of it as `param`."""
    by_place: dict[str, list[str]] = {}
    for problem in problems[:40]:
        by_place.setdefault(_place(problem), []).append(_problem(problem))
    lines = [
        f"{place}: {' or '.join(dict.fromkeys(texts))}" if place else texts[0]
        for place, texts in by_place.items()
    ]
    if len(lines) > 5:
        lines[5:] = [f"and {len(lines) - 5} more"]
    return ApiError(400, "; ".join(lines), param=next(iter(by_place), None))


def _problem(problem: Mapping[str, Any]) -> str:
    text = str(problem.get("msg", "invalid")).removeprefix("Value error, ")
    if problem.get("type") == "extra_forbidden":
        return "unknown field"
    got = problem.get("input")
    if isinstance(got, str | int | float | bool) and problem.get("type") != "value_error":
        text += f", got {got!r:.60}"
    return text


def _place(problem: Mapping[str, Any]) -> str:
    """messages.0.content of ("body", "messages", 0, "content"), without names of union members."""
    parts = [str(part)[:80] for part in problem.get("loc", ())[1:8]]
    return ".".join(part for part in parts if not _UNION_MEMBER.search(part))
