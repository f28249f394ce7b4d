"""What the engine tells of itself: its adapters and its counters. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from loragraph.adapters.report import LoadReport
from loragraph.engine.counters import CoreStats
from loragraph.engine.holds import Holds
from loragraph.engine.plan import SchedulerStats
from loragraph.engine.pool import Pool, PoolStats, State
from loragraph.engine.registry import Generation, LoadCounts, Registry
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
    path: Path | None  # None: made in memory
    digest: str | None  # known from the first load on
    state: State
    nbytes: int | None  # in memory
    rank_max: int | None
    is_alora: bool
    n_users: int  # requests and pins that hold it
    n_targets: int | None = None
    pinned: bool = False
    coverage: Mapping[str, tuple[int, int]] | None = None  # of its header, as in a LoadReport
    report: LoadReport | None = None  # of the last load: coverage, ranks, scales, warnings
    counts: LoadCounts = field(default_factory=LoadCounts)


def adapter_rows(
    registry: Registry,
    pool: Pool[Generation],
    holds: Holds,
    files: Mapping[str, tuple[int | None, Path | None]],
) -> Iterator[AdapterRow]:
    """The table's rows for these names; on the thread that owns the pool, which reads no folder.

    `files`: Registry.shown() of the names that nobody asked for yet.
    """
    current = registry.current()
    pinned = holds.pinned
    for name, (number, path) in files.items():
        generation = current.get(name)
        if generation is None:
            yield AdapterRow(name, number, path, None, State.ABSENT, None, None, False, 0)
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
            generation.header.n_targets,
            generation in pinned,
            generation.header.coverage,
            generation.report,
            replace(generation.counts),
        )
