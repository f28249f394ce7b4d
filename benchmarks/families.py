"""scripts/bench families: prefill and decode of every family beside libllama, in one run.

A random model of each family (the tests' generator, in a size at which a step is more than its
overhead) and real models, the base and an adapter of every linear weight. The two engines alternate
round by round as in `scripts/bench engine`; a ratio above 1 is faster than libllama.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks import models
from benchmarks.engine import Row, speed_rows
from benchmarks.real_models import known_models, tell_absent
from benchmarks.sides import Settings, Side, SideName, open_side, prepare
from benchmarks.targets import Target, verdicts
from tests.tiny import TinyAdapter, TinyModel
from tests.tiny_experts import TINY_EXPERTS
from tests.tiny_families import TINY_FAMILIES

SIZES: Mapping[str, dict[str, Any]] = {
    "small": {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "n_ff": 1536},
    "tiny": {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_ff": 256},
}
EXPERTS = {
    "small": {"n_expert": 16, "n_used": 4, "n_ff_exp": 512, "n_ff": 512},
    "tiny": {"n_expert": 8, "n_used": 2, "n_ff_exp": 128, "n_ff": 128},
}
_LATENT = {"n_lora_q": 256, "n_lora_kv": 128, "n_nope": 64, "n_value": 64, "rope_dim": 32}
_WITH_EXPERTS = {"mixtral" if arch == "llama" else arch: arch for arch in TINY_EXPERTS}
_ALL = (*TINY_FAMILIES, *_WITH_EXPERTS)
_HEAD_DIM, _N_VOCAB = 64, 2048
_ASKED = 0.95  # of libllama's speed


def random_model(arch: str, size: str, type_: str) -> TinyModel:
    """A family's model with heads of 64, whatever its tests have."""
    weight_type = gguf.GGMLQuantizationType[type_]
    family, sizes = TINY_FAMILIES.get(arch), SIZES[size]
    if family is None:
        family = TINY_EXPERTS[_WITH_EXPERTS[arch]]
        sizes = sizes | EXPERTS[size] | (_LATENT if arch == "deepseek2" else {})
    return family(
        **sizes,
        head_dim=_HEAD_DIM,
        n_vocab=_N_VOCAB,
        n_ctx_train=4096,
        weight_type=weight_type,
    )


def random_files(arch: str, size: str, type_: str, cache: Path) -> tuple[Path, Path]:
    """Base and adapter in the cache, made again each time: they are small."""
    cache.mkdir(parents=True, exist_ok=True)
    model = random_model(arch, size, type_)
    base, adapter = (cache / f"{arch}-{size}-{type_}{end}.gguf" for end in ("", "-adapter"))
    model.write(base)
    dtype = gguf.GGMLQuantizationType.F16
    TinyAdapter(rank=16, alpha=16, dtype=dtype, b_std=0.02).write(adapter, model)
    return base, adapter


def markdown(rows: Sequence[Row]) -> str:
    """The table for a report."""
    lines = [
        "| model | measure | libllama | loragraph | ratio (quartiles) | at least 0.95 |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        low, high = row.spreads["routed"]
        ratio = row.ratios["routed"]
        cells = (
            row.type,
            f"{row.measure}, {row.unit}",
            f"{row.medians['libllama']:.0f}",
            f"{row.medians['routed']:.0f}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            "yes" if ratio >= _ASKED else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compact(rows: Sequence[Row]) -> str:
    """A line a model: its ratios, the median of the rounds' ratios each."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    by_model: dict[str, dict[str, float]] = {}
    for row in rows:
        by_model.setdefault(row.type, {})[row.measure] = row.ratios["routed"]
    lines = [f"| model | {' | '.join(measures)} |", "|---|" + "---:|" * len(measures)]
    for model, ratios in by_model.items():
        cells = [f"{ratios[name]:.2f}" if name in ratios else "" for name in measures]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(rows: Sequence[Row]) -> list[Target]:
    """Each row's ratio, the median of the rounds' ratios."""
    return [
        Target(f"{row.type}, {row.measure}", row.ratios["routed"], "times libllama", low=_ASKED)
        for row in rows
    ]


def measure(
    label: str, base: Path, adapter: Path, n_vocab: int, args: argparse.Namespace
) -> Iterable[Row]:
    """Base and adapter, prefill and decode, of one model."""
    settings = Settings(args.threads, args.n_ctx, args.clock)
    prompt = np.random.default_rng(0).integers(300, n_vocab, args.prefill).tolist()
    names: tuple[SideName, ...] = ("routed", "libllama")
    sides: dict[SideName, Side] = {}
    try:
        for name in names:
            sides[name] = open_side(name, base, adapter, settings)
        yield from speed_rows(label, sides, prompt, args.rounds, 1)
    finally:
        for side in sides.values():
            side.close()


def run(args: argparse.Namespace, report: Callable[[Row], None]) -> list[Row]:
    """All rows; each is reported when it is there."""
    prepare()
    rows: list[Row] = []
    jobs: list[tuple[str, Path, Path, int]] = []
    for arch in args.families.split(",") if args.families else ():
        label = f"{arch}, {args.size} {args.type}"
        jobs.append((label, *random_files(arch, args.size, args.type, args.cache), _N_VOCAB))
    for path in [*args.real, *([] if args.no_real else known_models())]:
        jobs.append((path.stem, path, models.random_adapter(path, args.cache), 30_000))
    for label, base, adapter, n_vocab in jobs:
        for row in measure(label, base, adapter, n_vocab, args):
            report(row)
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="scripts/bench families", description=__doc__)
    parser.add_argument("--families", default=",".join(_ALL), help="'' for none")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--type", default="Q4_0", help="of the random models' matrices")
    parser.add_argument("--real", type=Path, action="append", default=[], help="a GGUF base")
    parser.add_argument("--no-real", action="store_true", help="leave installed packages' out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu sums the time of all threads: use --threads 1")
    if not args.no_real:
        tell_absent(lambda line: print(line, flush=True))
    rows = run(args, lambda row: print(f"{row.type} {row.measure}: {row.ratios}", flush=True))
    print(f"\n{args.threads} threads, {args.clock} clock, medians of {args.rounds} rounds\n")
    print(f"{markdown(rows)}\n\n{compact(rows)}\n\n{verdicts(targets(rows))}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
