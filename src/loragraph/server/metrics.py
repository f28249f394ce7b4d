"""Counters by adapter and llama-server's own, as Prometheus text. Each server has its own registry.

An adapter's label is its name for the first so many names that were met, and "other" for all later
ones: a label keeps its meaning while the process lives, and no client can make more of them. A
request with several adapters counts for each of them; one with none counts for "base".
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loragraph.engine.counters import GAP_BOUNDS_S
from loragraph.engine.pool import State as Residence
from loragraph.engine.registry import LoadCounts
from loragraph.engine.table import AdapterRow, EngineStats
from loragraph.errors import LifecycleError
from loragraph.server.errors import ApiError
from loragraph.server.runs import Run
from loragraph.server.served import Served, served_of
from loragraph.server.state import Phase, ServerState, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABELS = 100
BASE, OTHER = "base", "other"

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms' buckets, seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's own numbers at the time of a scrape."""

    stats: EngineStats
    rows: Sequence[AdapterRow]


class AdapterLabels:
    """Names to labels; the first `limit` names keep theirs, the others share one."""

    def __init__(self, limit: int = MAX_LABELS) -> None:
        self._limit = limit
        self._labels: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of an adapter. One that is called as a common label shares "other"."""
        found = self._labels.get(name)
        if found is not None:
            return found
        if len(self._labels) >= self._limit or name in (BASE, OTHER):
            return OTHER
        return self._labels.setdefault(name, name)


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Counts `value`; `le` includes its bound, as Prometheus has it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def add_counts(self, counts: Sequence[int], total: float) -> None:
        """Counts values that were counted by the same bounds elsewhere."""
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, count of all values up to it)."""
        out, so_far = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            out.append((bound, float(so_far)))
        return out


@dataclass(slots=True)
class _Series:
    """What is counted under one label."""

    outcomes: Counter[str] = field(default_factory=Counter)
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    token: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))

    def add(self, served: Served) -> None:
        """Counts a request."""
        self.outcomes[served.outcome] += 1
        self.n_prompt += served.n_prompt
        self.n_cached += served.n_cached
        self.n_generated += served.n_generated
        if served.queued_s is not None:
            self.queue.add(served.queued_s)
            if served.prompt_s is not None and served.n_generated:
                self.first_token.add(served.queued_s + served.prompt_s)
        if served.gaps is not None:
            self.token.add_counts(served.gaps.counts, served.gaps.total_s)


class ServerMetrics(Collector):
    """The metrics of one server. `snapshot` is asked at each scrape; None: no engine yet."""

    def __init__(
        self, snapshot: Callable[[], Snapshot | None], max_labels: int = MAX_LABELS
    ) -> None:
        self.started = time.time()
        self.labels = AdapterLabels(max_labels)
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._series: dict[str, _Series] = {BASE: _Series()}
        self._loads = _Loads(self.labels)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, served: Served) -> None:
        """Counts a request that has ended; for any thread."""
        with self._lock:
            for label in {self.labels.of(name) for name in served.adapters} or {BASE}:
                self._series.setdefault(label, _Series()).add(served)

    def render(self) -> bytes:
        """Prometheus text. Waits for the engine's step to end, so not on the event loop."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise scrape to find the names out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics; for the registry."""
        now = self._snapshot()
        with self._lock:
            out = list(_by_adapter(self._series))
            if now is not None:
                out += _llama_server(now.stats)
                out += _of_engine(now.stats)
                out += self._loads.metrics(now.rows)
        yield from out


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _llama_server(stats: EngineStats) -> Iterator[Metric]:
    """The names that llama-server's dashboards ask for, with its meaning."""
    core, scheduler = stats.core, stats.scheduler
    n_prompt, n_text = core.n_prompt_tokens_computed, core.n_generated_tokens
    p = "llamacpp:"
    yield _counter(f"{p}prompt_tokens", "Prompt tokens computed.", n_prompt)
    cached = core.n_prompt_tokens_cached
    yield _counter(f"{p}prompt_tokens_cached", "Prompt tokens from the cache.", cached)
    yield _counter(f"{p}prompt_seconds", "Seconds of prompt processing.", core.prompt_s)
    yield _counter(f"{p}tokens_predicted", "Generated tokens.", n_text)
    yield _counter(f"{p}tokens_predicted_seconds", "Seconds of generation.", core.decode_s)
    yield _counter(f"{p}n_decode", "Steps.", core.n_steps)
    yield _gauge(f"{p}n_tokens_max", "Tokens of the longest sequence.", core.n_tokens_max)
    for name, text, n, seconds in (
        ("prompt_tokens_seconds", "Prompt tokens a second, mean.", n_prompt, core.prompt_s),
        ("predicted_tokens_seconds", "Tokens a second, mean.", n_text, core.decode_s),
        (
            "n_busy_slots_per_decode",
            "Sequences in a step, mean.",
            core.n_step_sequences,
            core.n_steps,
        ),
    ):
        yield _gauge(f"{p}{name}", text, n / seconds if seconds else 0.0)
    n_deferred = core.n_jobs_waiting + core.n_jobs_loading + scheduler.n_waiting
    yield _gauge(f"{p}requests_processing", "Sequences that run.", scheduler.n_running)
    yield _gauge(f"{p}requests_deferred", "Requests and sequences that wait.", n_deferred)
    for name in ("draft_tokens", "accepted_tokens", "drafts"):  # no speculative decoding
        yield _counter(f"{p}spec_decode_num_{name}", "Always 0 here.", 0)


def _by_adapter(series: Mapping[str, _Series]) -> Iterator[Metric]:
    """What requests had to do with, by adapter."""
    requests = CounterMetricFamily(
        "loragraph_requests", "Requests that ended, by how.", labels=("adapter", "outcome")
    )
    for label, own in series.items():
        for outcome, n in sorted(own.outcomes.items()):
            requests.add_metric((label, outcome), n)
    yield requests
    for name, text, key in (
        ("prompt_tokens", "Prompt tokens.", "n_prompt"),
        ("prompt_tokens_cached", "Prompt tokens from the cache.", "n_cached"),
        ("generated_tokens", "Generated tokens.", "n_generated"),
    ):
        counter = CounterMetricFamily(f"loragraph_{name}", text, labels=("adapter",))
        for label, own in series.items():
            counter.add_metric((label,), getattr(own, key))
        yield counter
    for name, text, key in (
        ("first_token_seconds", "From a request to its first token.", "first_token"),
        ("token_seconds", "Between a request's tokens.", "token"),
        ("queue_seconds", "From a request to its admission.", "queue"),
    ):
        family = HistogramMetricFamily(f"loragraph_{name}", text, labels=("adapter",))
        for label, own in series.items():
            histogram: Histogram = getattr(own, key)
            family.add_metric((label,), histogram.buckets(), histogram.total)
        yield family


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    """Cells, steps and residency as a whole."""
    core, scheduler, pool = stats.core, stats.scheduler, stats.pool
    yield _counter("loragraph_steps", "Steps.", core.n_steps)
    yield _counter("loragraph_step_failures", "Steps that failed.", core.n_step_failures)
    yield _counter("loragraph_preemptions", "Sequences put back.", scheduler.n_preemptions)
    yield _counter("loragraph_hit_tokens", "Tokens found in the tree.", scheduler.n_hit_tokens)
    yield _counter("loragraph_evicted_tokens", "Tokens evicted.", scheduler.n_evicted_tokens)
    yield _gauge("loragraph_cells", "Cells.", scheduler.n_cells)
    yield _gauge("loragraph_cells_used", "Cells that hold a token.", scheduler.n_cells_used)
    yield _gauge("loragraph_cells_in_use", "Cells of running ones.", scheduler.n_cells_in_use)
    yield _gauge("loragraph_sequences_running", "Sequences that run.", scheduler.n_running)
    yield _gauge("loragraph_jobs", "Requests that have not ended.", core.n_jobs)
    yield _gauge("loragraph_adapters_resident", "Adapters in memory.", pool.n_resident)
    yield _gauge("loragraph_adapters_bytes", "Bytes of adapters in memory.", pool.nbytes)


class _Loads:
    """Residency by adapter. What was counted stays, whatever becomes of the generation."""

    def __init__(self, labels: AdapterLabels) -> None:
        self._labels = labels
        self._totals: dict[str, LoadCounts] = {}  # by label
        self._seen: dict[int, LoadCounts] = {}  # of each generation at the last scrape

    def metrics(self, rows: Iterable[AdapterRow]) -> Iterator[Metric]:
        """The metrics of now."""
        nbytes = self._add(rows)
        gauge = GaugeMetricFamily(
            "loragraph_adapter_resident_bytes", "Bytes in memory.", labels=("adapter",)
        )
        for label, value in nbytes.items():
            gauge.add_metric((label,), value)
        yield gauge
        for name, text, key in (
            ("loads", "Loads into memory.", "n_loads"),
            ("load_seconds", "Seconds of loading.", "load_s"),
            ("evictions", "Evictions from memory.", "n_evictions"),
            ("load_failures", "Loads that failed.", "n_failures"),
        ):
            counter = CounterMetricFamily(f"loragraph_adapter_{name}", text, labels=("adapter",))
            for label, counts in self._totals.items():
                counter.add_metric((label,), getattr(counts, key))
            yield counter

    def _add(self, rows: Iterable[AdapterRow]) -> dict[str, int]:
        """Adds what is new since the last scrape; bytes in memory by label."""
        nbytes: dict[str, int] = {}
        seen: dict[int, LoadCounts] = {}
        for row in rows:
            if row.generation is None:  # of a folder's files, one that nobody asked for yet
                continue
            label = self._labels.of(row.name)
            resident = row.state is Residence.RESIDENT
            nbytes[label] = nbytes.get(label, 0) + ((row.nbytes or 0) if resident else 0)
            before = self._seen.get(row.generation, LoadCounts())
            total = self._totals.setdefault(label, LoadCounts())
            for name in LoadCounts.__slots__:
                more = getattr(row.counts, name) - getattr(before, name)
                setattr(total, name, getattr(total, name) + more)
            seen[row.generation] = row.counts
        self._seen = seen
        return nbytes


class _RunCounts:
    """Counts the runs of a server as they end."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def on_start(self, run: Run) -> None:
        """Nothing is counted yet."""

    def on_end(self, run: Run) -> None:
        """Counts it."""
        self._metrics.observe(served_of(run))


def install(app: FastAPI, state: ServerState) -> None:
    """Adds what counts, and the route that shows it."""
    metrics = ServerMetrics(lambda: _snapshot(state))
    state.hooks.append(_RunCounts(metrics))
    state.extra["metrics"] = metrics
    app.include_router(router)


router = APIRouter(tags=["server"])


@router.get("/metrics", response_class=Response)
async def show(state: State) -> Response:
    """Prometheus text; 501 without --metrics, as llama-server has it."""
    if not state.config.with_metrics:
        raise ApiError(
            501, "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    metrics: ServerMetrics = state.extra["metrics"]
    text = await asyncio.to_thread(metrics.render)
    headers = {"Process-Start-Time-Unix": str(int(metrics.started))}
    return Response(text, headers=headers, media_type=CONTENT_TYPE)


def _snapshot(state: ServerState) -> Snapshot | None:
    """The engine's numbers; None while there is none, or none any more."""
    if state.phase is Phase.LOADING:
        return None
    try:
        return Snapshot(state.engine.stats(), state.engine.adapters)
    except LifecycleError:
        return None
