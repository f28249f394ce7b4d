"""What the engine tells of itself: its adapters and its counters. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loragraph.engine.counters import CoreStats
from loragraph.engine.plan import SchedulerStats
from loragraph.engine.pool import LoadCounts, Pool, PoolStats, State
from loragraph.engine.registry import Generation, Registry
from loragraph.engine.runner import Counters


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of all parts, taken between two steps."""

    core: CoreStats
    scheduler: SchedulerStats
    pool: PoolStats
    runner: Counters


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One name of the table of adapters."""

    name: str
    generation: int | None  # None: a file of the folder that nobody asked for yet
    path: Path | None
    digest: str | None  # known from the first load on
    state: State
    nbytes: int | None  # in memory
    rank_max: int | None
    is_alora: bool
    n_users: int  # requests and pins that hold it
    counts: LoadCounts  # since the name was first registered


def adapter_rows(
    registry: Registry, pool: Pool[Generation], names: Sequence[str]
) -> Iterator[AdapterRow]:
    """The table's rows for these names; on the thread that owns the pool."""
    current = registry.current()
    for name in names:
        generation = current.get(name)
        if generation is None:
            yield AdapterRow(
                name, None, None, None, State.ABSENT, None, None, False, 0, LoadCounts()
            )
            continue
        yield AdapterRow(
            name,
            generation.number,
            generation.path,
            generation.digest,
            pool.state(generation),
            generation.header.nbytes,
            generation.header.rank_max,
            bool(generation.header.invocation_tokens),
            pool.n_users(generation),
            replace(generation.counts),
        )
