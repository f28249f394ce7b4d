"""One line of JSON for each request, to the logger `loragraph.access`."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loragraph.server.gate import request_name
from loragraph.server.runs import Run
from loragraph.server.served import Served, served_of
from loragraph.server.state import ServerState

_log = logging.getLogger("loragraph.access")


@dataclass(slots=True)
class _Entry:
    """What is known of a request that is being answered."""

    runs: list[Run] = field(default_factory=list)
    status: int | None = None  # None: no answer was begun


# Of the task that answers a request, and of those that it starts.
_current: ContextVar[_Entry | None] = ContextVar("loragraph.access_log", default=None)


def install(app: FastAPI, state: ServerState) -> None:
    """Has an application write a line at the end of each request; to be added last."""
    state.hooks.append(_RunNotes())
    app.add_middleware(AccessLog)


class AccessLog:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the request through, and writes its line once it was answered or left."""
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        entry, started = _Entry(), time.monotonic()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        request_name(scope)  # before a copy is made below a prefix
        token = _current.set(entry)
        try:
            await self._app(scope, receive, noting)
        finally:
            _current.reset(token)
            line = _line(scope, entry, time.monotonic() - started)
            _log.info("%s", json.dumps(line, ensure_ascii=True, separators=(",", ":")))


class _RunNotes:
    """Tells a request's entry of its generations."""

    def on_start(self, run: Run) -> None:
        """Notes it."""
        entry = _current.get()
        if entry is not None:
            entry.runs.append(run)

    def on_end(self, run: Run) -> None:
        """Its numbers are read when the line is written."""


def _line(scope: Scope, entry: _Entry, seconds: float) -> dict[str, Any]:
    """What the line says. Neither query nor headers nor texts: they may hold what is secret."""
    client = scope.get("client")
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": request_name(scope).id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": entry.status,
        "total_ms": _ms(seconds),
    }
    if entry.runs:
        line |= _of_runs(entry.runs, [served_of(run) for run in entry.runs])
    return line


def _of_runs(runs: list[Run], served: list[Served]) -> dict[str, Any]:
    """Sums of the generations of one request; times of the slowest."""
    first = [run.first_event - run.started for run in runs if run.first_event is not None]
    errors = [type(run.error).__name__ for run in runs if run.error is not None]
    line: dict[str, Any] = {
        "outcome": sorted({one.outcome for one in served}),
        "adapters": _adapters(runs),
        "prompt_tokens": sum(one.n_prompt for one in served),
        "cached_tokens": sum(one.n_cached for one in served),
        "generated_tokens": sum(one.n_generated for one in served),
        "queued_ms": _ms(max((one.queued_s or 0.0 for one in served), default=0.0)),
        "prompt_ms": _ms(max((one.prompt_s or 0.0 for one in served), default=0.0)),
        "decode_ms": _ms(max((one.decode_s or 0.0 for one in served), default=0.0)),
    }
    if first:
        line["first_event_ms"] = _ms(max(first))
    if errors:
        line["error"] = errors[0]
    return line


def _adapters(runs: list[Run]) -> list[dict[str, Any]]:
    """Each adapter of the runs once; the generation is known where the run has a result."""
    found: dict[tuple[str, float], int | None] = {}
    for run in runs:
        for name, scale in run.mix.scales.items():
            if scale != 0:
                found.setdefault((name, scale), None)
        answer = run.embedding if run.result is None else run.result
        for use in answer.adapters if answer is not None else ():
            found[use.name, use.scale] = use.generation
    return [
        {"name": name, "generation": generation, "scale": scale}
        for (name, scale), generation in found.items()
    ]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
