"""Tokens a second of concurrent requests over HTTP, beside llama-server.

Each cell of the table is n requests at once, each with a fresh random prompt and 64 generated
tokens, with no adapter, one adapter for all, or each its own. In each round the servers take turns;
the figure is the median over the rounds of all generated tokens over the time from the first
request to the last answer. Every adapter was used before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.servers import CompletionServer, side_by_side
from benchmarks.targets import Samples, Target, better, peers

MODES = {"none": "no adapter", "one": "one for all", "each": "each its own"}
N_TOKENS = 64
_OVER_PEER = {8: 3.3, 32: 5.0}  # each its own, by requests
_OF_ONE = {8: 0.8, 32: 0.65}  # each its own over one for all
_ALONE, _NO_ADAPTER = 1.15, 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Generated tokens a second of one server: median, lowest and highest of the rounds."""

    type: str
    mode: str
    n_requests: int
    server: str  # "loragraph", "llama-server", "llama-server -kvu"
    tokens_per_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell of the table: ours, the better of the peer's two layouts, and ours of one for all."""

    type: str
    n_requests: int
    mode: str
    ours: float
    peer: float | None
    peer_name: str
    of_one: float | None

    @property
    def ratio(self) -> float | None:
        """Over the peer."""
        return None if self.peer is None else self.ours / self.peer


def measure(
    servers: dict[str, CompletionServer], type_: str, n: int, n_prompt: int, n_rounds: int
) -> list[Cell]:
    """All modes at `n` requests; the first round only warms."""
    rng = np.random.default_rng(n)
    found: dict[tuple[str, str], list[float]] = {}
    for i in range(n_rounds + 1):
        for mode in MODES:
            for name, server in servers.items():
                prompts = [rng.integers(100, 40_000, n_prompt).tolist() for _ in range(n)]
                chosen = [None if mode == "none" else 0 if mode == "one" else k for k in range(n)]
                seconds = server.seconds(prompts, chosen, N_TOKENS)
                if i:
                    found.setdefault((mode, name), []).append(n * N_TOKENS / seconds)
    cells = []
    for (mode, name), own in found.items():
        values = Samples.of(own)
        cells.append(Cell(type_, mode, n, name, values.median, values.low, values.high))
    return cells


def run(
    bases: dict[str, Path],
    paths: Sequence[Path],
    counts: Sequence[int],
    *,
    peer: Path | None,
    n_prompt: int,
    n_rounds: int,
    n_threads: int,
    report: Callable[[str], None],
) -> list[Cell]:
    """All cells, of the bases by type; each count's are reported when they are there."""
    cells: list[Cell] = []
    for type_, base in bases.items():
        for n in counts:
            n_ctx = n * (n_prompt + N_TOKENS + 64)
            with side_by_side(
                peer, base, paths[:n], n_slots=n, n_threads=n_threads, n_ctx=n_ctx
            ) as servers:
                own = measure(servers, type_, n, n_prompt, n_rounds)
            report(markdown(own))
            cells += own
    return cells


def compare(cells: Sequence[Cell]) -> list[Comparison]:
    """A comparison for each base type, number of requests and mode."""
    found = []
    for type_, n, mode in dict.fromkeys((c.type, c.n_requests, c.mode) for c in cells):
        same = [c for c in cells if (c.type, c.n_requests) == (type_, n)]
        own = {c.server: c.tokens_per_s for c in same if c.mode == mode}
        one = {c.mode: c.tokens_per_s for c in same if c.server == "loragraph"}.get("one")
        ours, others = own["loragraph"], peers(own)
        name, peer = better(others, higher=True) if others else ("", None)
        of_one = ours / one if one is not None and mode == "each" else None
        found.append(Comparison(type_, n, mode, ours, peer, name, of_one))
    return found


def markdown(cells: Sequence[Cell]) -> str:
    """The table: the better of the peer's two layouts beside ours."""
    lines = [
        "| base | requests | adapters | llama-server | loragraph | ratio | of one for all |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in compare(cells):
        theirs, ratio = ("", "") if row.peer is None else (f"{row.peer:.0f}", f"{row.ratio:.2f}")
        share = "" if row.of_one is None else f"{row.of_one:.0%}"
        lines.append(
            f"| {row.type} | {row.n_requests} | {MODES[row.mode]} "
            f"| {theirs} | {row.ours:.0f} | {ratio} | {share} |"
        )
    return "\n".join(lines)


def targets(cells: Sequence[Cell]) -> list[Target]:
    """What is asked of the table, where it has the figures."""
    found = []
    for row in compare(cells):
        n = row.n_requests
        where = f"{row.type}, {n} request{'s' * (n > 1)}, {MODES[row.mode]}"
        if row.ratio is not None:
            low = _asked_over_peer(row.mode, n)
            if low is not None:
                found.append(Target(where, row.ratio, "times llama-server", low=low))
        if row.of_one is not None and n in _OF_ONE:
            found.append(Target(where, row.of_one, "of one for all", low=_OF_ONE[n]))
    return found


def _asked_over_peer(mode: str, n: int) -> float | None:
    if mode == "none":
        return _NO_ADAPTER
    if n == 1:
        return _ALONE
    return _OVER_PEER.get(n) if mode == "each" else None
