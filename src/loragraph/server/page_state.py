"""GET /api/state: what the page shows of a server, once a second for each who looks at it.

Taken once for all viewers, and the adapters' rows are sent when they change: a table of thousands
costs little.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from loragraph.engine.table import AdapterRow, EngineStats
from loragraph.server.routing import api_router
from loragraph.server.runs import Run
from loragraph.server.state import ServerState, State

MIN_AGE_S = 0.5
"""A snapshot is shown for at least so long, and for AGE_FACTOR times the work of taking it."""
AGE_FACTOR = 30
MAX_REMOVED = 1000
"""Names that are remembered as gone; who has an older table gets all rows."""

router = api_router(include_in_schema=False)
Row = dict[str, Any]


class TokenCounts:
    """Generated tokens by adapter; RunHooks of the server."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()

    def on_start(self, run: Run) -> None:
        """Nothing to count yet."""

    def on_end(self, run: Run) -> None:
        """Counts the run's tokens for each of its adapters."""
        for name in _names(run):
            self._ended[name] += _n_tokens(run)

    def of(self, running: list[Run]) -> Mapping[str, int]:
        """Tokens by name, those of the given runs included."""
        counts = self._ended.copy()
        for run in running:
            for name in _names(run):
                counts[name] += _n_tokens(run)
        return counts

    def forget(self, known: Mapping[str, Any]) -> None:
        """Drops names that nobody has any more, so that their number stays bounded."""
        for name in self._ended.keys() - known.keys():
            del self._ended[name]


@dataclass(slots=True)
class ChangedRows:
    """Rows by name with the version in which each changed last."""

    epoch: str = field(default_factory=lambda: secrets.token_hex(4))  # of this process
    version: int = 0
    _rows: dict[str, tuple[int, Row]] = field(default_factory=dict)
    _removed: dict[str, int] = field(default_factory=dict)
    _oldest: int = 0  # removals before this version are forgotten

    @property
    def tag(self) -> str:
        """Names the present state of the rows."""
        return f"{self.epoch}-{self.version}"

    def take(self, rows: Mapping[str, Row]) -> None:
        """The rows of now."""
        version = self.version + 1
        changed = [name for name, row in rows.items() if self._rows.get(name, (0, None))[1] != row]
        removed = self._rows.keys() - rows.keys()
        if not changed and not removed:
            return
        self.version = version
        for name in changed:
            self._rows[name] = (version, rows[name])
            self._removed.pop(name, None)
        for name in removed:
            del self._rows[name]
            self._removed[name] = version
        while len(self._removed) > MAX_REMOVED:
            name = next(iter(self._removed))
            self._oldest = self._removed.pop(name)

    def since(self, tag: str) -> dict[str, Any]:
        """What changed since the state of that tag; all rows where that is not known."""
        epoch, _, number = tag[:64].partition("-")
        since = int(number) if number.isdecimal() and number.isascii() else -1
        if epoch != self.epoch or not self._oldest <= since <= self.version:
            rows = [row for _, row in self._rows.values()]
            return {"table": self.tag, "all": True, "adapters": rows, "removed": []}
        rows = [row for version, row in self._rows.values() if version > since]
        removed = [name for name, version in self._removed.items() if version > since]
        return {"table": self.tag, "all": False, "adapters": rows, "removed": removed}


class PageState:
    """One server's snapshot for the page. Belongs to the event loop."""

    def __init__(self, state: ServerState) -> None:
        self.tokens = TokenCounts()
        self._state = state
        self._rows = ChangedRows()
        self._lock = asyncio.Lock()
        self._valid_until = 0.0
        self._figures: dict[str, Any] = {}

    async def answer(self, tag: str, version: str) -> dict[str, Any]:
        """The figures, and the rows that changed since `tag`; `version`: the application's."""
        async with self._lock:  # who comes meanwhile gets the same
            if time.monotonic() >= self._valid_until:
                await self._refresh()
        about = {"status": self._state.phase, "version": version}
        return {**about, **self._figures, **self._rows.since(tag)}

    async def _refresh(self) -> None:
        tokens = self.tokens.of(list(self._state.runs))
        figures, rows, work_s = await asyncio.to_thread(_timed, self._state, tokens)
        self._figures = figures
        self._rows.take(rows)
        self.tokens.forget(rows)
        self._valid_until = time.monotonic() + max(MIN_AGE_S, AGE_FACTOR * work_s)


@router.get("/api/state")
async def page_state(request: Request, state: State, table: str = "") -> dict[str, Any]:
    """Figures of the server, and its adapters where they changed since `table`."""
    _ = state.engine  # 503 while it is loading
    return await of(state).answer(table, request.app.version)


def of(state: ServerState) -> PageState:
    """The server's own."""
    found = state.extra.setdefault("page", None) or PageState(state)
    assert isinstance(found, PageState)
    state.extra["page"] = found
    return found


def _names(run: Run) -> list[str]:
    return [name for name, scale in run.mix.scales.items() if scale != 0]


def _n_tokens(run: Run) -> int:
    """Tokens generated; those of a run without events are known from its result."""
    if run.result is None:
        return run.n_events
    return sum(len(choice.tokens) for choice in run.result.choices)


def _timed(
    state: ServerState, tokens: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Row], float]:
    """Figures and rows, and the work in seconds: this thread's, without its waiting for a step."""
    start = time.thread_time()
    figures, rows = _take(state, tokens)
    return figures, rows, time.thread_time() - start


def _take(state: ServerState, tokens: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Row]]:
    """Figures and rows of now. Waits for the engine's thread, so not on the loop."""
    engine = state.engine
    adapters = engine.adapters
    names = {row.name for row in adapters}
    first = [name for name in state.config.default_mix if name in names]
    ids = state.ids.sync(dict.fromkeys([*first, *(row.name for row in adapters)]))
    folder = state.config.adapter_dir
    folders = () if folder is None else (folder.absolute(), folder.resolve())
    defaults = state.default_mix
    rows = {
        row.name: {
            **_row(row, folders),
            "id": ids.get(row.name),
            "default_scale": defaults.get(row.name, 0.0),
            "tokens": tokens.get(row.name, 0),
        }
        for row in adapters
    }
    figures = {
        "base": {"name": state.base_name, "n_ctx": engine.config.sequence_limit},
        "time_s": time.monotonic(),
        **_figures(engine.stats()),
    }
    return figures, rows


def _row(row: AdapterRow, folders: tuple[Path, ...]) -> Row:
    coverage = row.coverage
    return {
        "name": row.name,
        "generation": row.generation,
        "file": _file(row, folders),
        "state": row.state.name.lower(),
        "pinned": row.pinned,
        "nbytes": row.nbytes,
        "rank": row.rank_max,
        "n_targets": row.n_targets,
        "n_base_targets": None if coverage is None else sum(all_ for _, all_ in coverage.values()),
        "coverage": None if coverage is None else {k: list(pair) for k, pair in coverage.items()},
        "alora": row.is_alora,
        "n_users": row.n_users,
    }


def _file(row: AdapterRow, folders: tuple[Path, ...]) -> str | None:
    """The file as the loading route takes it; None for one outside of the server's folder."""
    if row.path is None:  # made in memory, or never asked for: then it lies in the folder
        return f"{row.name}.gguf" if row.generation is None else None
    for folder in folders:
        if row.path.is_relative_to(folder):
            return str(row.path.relative_to(folder))
    return None


def _figures(stats: EngineStats) -> dict[str, Any]:
    core, scheduler, pool = stats.core, stats.scheduler, stats.pool
    return {
        "counters": {
            "generated": core.n_generated_tokens,
            "prompt": core.n_prompt_tokens,
            # A sequence that was preempted finds its prompt a second time.
            "hit": min(scheduler.n_hit_tokens, core.n_prompt_tokens),
            "finished": core.n_finished,
            "failed": core.n_failed,
        },
        "cells": {
            "total": scheduler.n_cells,
            "used": scheduler.n_cells_used,
            "in_use": scheduler.n_cells_in_use,
            "shared": scheduler.n_cells_shared,
        },
        "requests": {
            "running": scheduler.n_running,
            "waiting": max(core.n_jobs - scheduler.n_running, 0),
        },
        "pool": {"resident": pool.n_resident, "loading": pool.n_loading, "nbytes": pool.nbytes},
    }
