"""What adapters that nobody uses cost: a server with 8 adapters beside one with 1,000 more.

The servers run at the same time and take turns, another one first in each round: tokens a second of
1 and 8 requests without an adapter and each with its own, and milliseconds of a one-token request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.servers import CompletionServer, LoragraphServer
from benchmarks.targets import Samples, Target

N_USED, N_UNUSED = 8, 1000
WITHOUT, WITH = "without", "with"
COUNTS = (1, 8)
N_TOKENS = 64
_N_PROMPT = 8
_N_SHORT = 20  # one-token requests of a round
_BOUND, _MOST = 0.03, 0.1  # of a median: the bound, and how far the rounds' spread may widen it


@dataclass(frozen=True, slots=True)
class Idle:
    """One measure on both servers."""

    what: str
    unit: str  # "tokens/s", "ms"
    without: Samples
    unused: Samples  # with N_UNUSED more registered

    @property
    def cost(self) -> float:
        """The share of speed or time that the unused adapters cost; below 0: none."""
        ratio = self.unused.median / self.without.median
        return ratio - 1 if self.unit == "ms" else 1 - ratio

    @property
    def noise(self) -> float:
        """How far the rounds of the server without them lie from their median, as a share of it."""
        own = self.without
        return max(own.high - own.median, own.median - own.low) / own.median


def _speed(server: CompletionServer, prompts: Sequence[Sequence[int]], *, own: bool) -> float:
    n = len(prompts)
    adapters = [i if own else None for i in range(n)]
    return n * N_TOKENS / server.seconds(prompts, adapters, N_TOKENS)


def _short_ms(server: CompletionServer, prompts: Sequence[Sequence[int]]) -> float:
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        server.ask(prompt, None, 1)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(servers: Mapping[str, CompletionServer], n_rounds: int) -> list[Idle]:
    """`servers`: WITHOUT and WITH. Both answer the same prompts; the first round only warms."""
    rng = np.random.default_rng(4)
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for i in range(n_rounds + 1):
        order = [WITHOUT, WITH] if i % 2 else [WITH, WITHOUT]
        for n in COUNTS:
            for own in (False, True):
                prompts = rng.integers(100, 40_000, (n, _N_PROMPT)).tolist()
                what = f"{n} request{'s' * (n > 1)}, {'each its own' if own else 'no adapter'}"
                into = found.setdefault((what, "tokens/s"), {WITHOUT: [], WITH: []})
                for name in order:
                    into[name].append(_speed(servers[name], prompts, own=own))
        prompts = rng.integers(100, 40_000, (_N_SHORT, _N_PROMPT)).tolist()
        into = found.setdefault(("a request of one token", "ms"), {WITHOUT: [], WITH: []})
        for name in order:
            into[name].append(_short_ms(servers[name], prompts))
    return [
        Idle(what, unit, Samples.of(own[WITHOUT][1:]), Samples.of(own[WITH][1:]))
        for (what, unit), own in found.items()
    ]


def run(base: Path, paths: Sequence[Path], *, n_rounds: int, n_threads: int) -> list[Idle]:
    """`paths`: the N_USED adapters, then those that nobody uses."""
    sizes = {"n_slots": N_USED, "n_threads": n_threads, "n_ctx": 8192}
    with ExitStack() as running:
        servers = {
            name: running.enter_context(LoragraphServer(base, own, **sizes))
            for name, own in ((WITHOUT, paths[:N_USED]), (WITH, paths))
        }
        return measure(servers, n_rounds)


def markdown(rows: Sequence[Idle]) -> str:
    """The table."""
    lines = [
        f"| measure | without unused adapters | with {N_UNUSED:,} "
        "| cost | spread of the rounds without |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.what}, {row.unit} | {row.without.median:.1f} | {row.unused.median:.1f} "
            f"| {row.cost:+.1%} | {row.noise:.1%} |"
        )
    return "\n".join(lines)


def targets(rows: Sequence[Idle]) -> list[Target]:
    """Nothing measurable: no more than the rounds of one server differ, or than 3 %.

    Rounds that are further apart than _MOST loosen nothing: such a run has to be repeated.
    """
    return [
        Target(
            f"cost of {N_UNUSED:,} unused adapters, {row.what}",
            100 * row.cost,
            "%",
            high=round(100 * min(_MOST, max(_BOUND, row.noise)), 1),
        )
        for row in rows
    ]
