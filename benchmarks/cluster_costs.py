"""What one replica takes for its steps, prompts and loads: measured here, read by the simulation.

A step's time is known for some numbers of sequences, without adapters, with one for all and with
one each; what lies between is interpolated. Also measured, to check the simulation against: the
engine under Poisson arrivals.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks.cluster_load import Arrival, Shape, arrivals
from loragraph.engine.engine import Engine
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request

COUNTS = (1, 2, 4, 8, 16)
RATES = (0.6, 1.2)  # requests a second of the check
N_ADAPTERS = 24
N_THREADS = 1  # a replica of one core: what else runs disturbs it least
N_SLOTS = 8  # fewer than adapters, so that loads happen
CHECK_S = 40.0
_DECODES = (16, 64)
_CONTEXT = 192
_PROMPTS = (64, 448)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    counts: tuple[int, ...]  # of sequences in a step
    base_step_s: tuple[float, ...]
    one_step_s: tuple[float, ...]  # one adapter for all
    each_step_s: tuple[float, ...]  # each its own
    base_token_s: float  # of a prompt
    adapter_token_s: float
    hit_token_s: float  # of a prompt that is in the prefix tree
    request_s: float  # of a prompt, however short
    load_s: float  # of an adapter's file that the system has in memory
    adapter_bytes: int
    max_sequences: int = COUNTS[-1]

    def step_s(self, n: int, n_adapted: int, n_adapters: int) -> float:
        """A decode step of n sequences, some with adapters, of which so many differ."""
        if n == 0:
            return 0.0
        base = float(np.interp(n, self.counts, self.base_step_s))
        if not n_adapted:
            return base
        one = float(np.interp(n_adapted, self.counts, self._over(self.one_step_s)))
        each = float(np.interp(n_adapted, self.counts, self._over(self.each_step_s)))
        share = (n_adapters - 1) / (n_adapted - 1) if n_adapted > 1 else 0.0
        return base + one + share * (each - one)

    def _over(self, steps: Sequence[float]) -> list[float]:
        return [max(a - b, 0.0) for a, b in zip(steps, self.base_step_s, strict=True)]


def read_costs(path: Path) -> tuple[Costs, dict[str, Any]]:
    """The costs, and all of the file."""
    found = json.loads(path.read_text())
    own: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in found["costs"].items()
    }
    return Costs(**own), found


def measure(path: Path, base_type: str, n_rounds: int, report: Callable[[str], None]) -> None:
    """Writes the file: costs, and what the engine did under arrivals."""
    cache = models.default_cache()
    base = models.variant(base_type, cache)
    files = [models.random_adapter(models.base_path(), cache, seed=i) for i in range(N_ADAPTERS)]
    names = {f"adapter-{i}": file for i, file in enumerate(files)}
    with Engine(base, names, n_ctx=16384, max_sequences=COUNTS[-1], n_threads=N_THREADS) as engine:
        costs = _costs(engine, files, n_rounds)
        report(json.dumps(asdict(costs), indent=1))
    served = []
    for rate in RATES:
        shape = Shape()
        trace = arrivals(rate, CHECK_S, N_ADAPTERS, 1.0, seed=7, base_share=0.1)
        with Engine(
            base,
            names,
            n_ctx=8192,
            max_sequences=COUNTS[-1],
            max_adapters=N_SLOTS,
            n_threads=N_THREADS,
        ) as engine:
            found = asyncio.run(_serve(engine, trace, shape))
        served.append({"rate": rate, **summary(found, shape.n_tokens)})
        report(json.dumps(served[-1]))
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {N_THREADS} thread",
        "base": f"{models.base_path().stem} as {base_type}",
        "costs": asdict(costs),
        "served": served,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def summary(found: Sequence[tuple[float, float, float]], n_tokens: int) -> dict[str, float]:
    """Of (arrival, first token, end) of each request."""
    firsts = [first - at for at, first, _ in found]
    length = max(end for *_, end in found) - min(at for at, *_ in found)
    return {
        "n_requests": len(found),
        "tokens_per_s": len(found) * n_tokens / length,
        "first_p50_s": float(np.quantile(firsts, 0.5)),
        "first_p95_s": float(np.quantile(firsts, 0.95)),
    }


def _costs(engine: Engine, files: Sequence[Path], n_rounds: int) -> Costs:
    loads = []
    for i, file in enumerate(files[:12]):
        start = time.perf_counter()
        engine.load_adapter(f"fresh-{i}", file, preload=True)
        loads.append(time.perf_counter() - start)
        engine.unload_adapter(f"fresh-{i}")
    modes: dict[str, Callable[[int], str | None]] = {
        "base": lambda _: None,
        "one": lambda _: "adapter-0",
        "each": lambda i: f"adapter-{i}",
    }
    steps = {
        mode: tuple(_step_s(engine, [name(i) for i in range(n)], n_rounds) for n in COUNTS)
        for mode, name in modes.items()
    }
    base, request = _prompt_s(engine, None, n_rounds)
    adapted, _ = _prompt_s(engine, "adapter-0", n_rounds)
    return Costs(
        COUNTS,
        steps["base"],
        steps["one"],
        steps["each"],
        base,
        adapted,
        _hit_s(engine, n_rounds),
        request,
        statistics.median(loads),
        files[0].stat().st_size,
    )


def _step_s(engine: Engine, adapters: Sequence[str | None], n_rounds: int) -> float:
    """From generations of two lengths over prompts that are in the prefix tree."""
    rng = np.random.default_rng(len(adapters))
    prompts = [rng.integers(100, 40_000, _CONTEXT).tolist() for _ in adapters]

    def run(n_tokens: int) -> float:
        requests = [_request(p, a, n_tokens) for p, a in zip(prompts, adapters, strict=True)]
        start = time.perf_counter()
        engine.generate_batch(requests)
        return time.perf_counter() - start

    run(2)
    pairs = [(run(_DECODES[0]), run(_DECODES[1])) for _ in range(n_rounds)]
    return statistics.median((b - a) / (_DECODES[1] - _DECODES[0]) for a, b in pairs)


def _prompt_s(engine: Engine, adapter: str | None, n_rounds: int) -> tuple[float, float]:
    """Of a token of a fresh prompt, and what remains for a prompt of none."""
    rng = np.random.default_rng(1)
    times: dict[int, list[float]] = {n: [] for n in _PROMPTS}
    for _ in range(2 * n_rounds):
        for n in _PROMPTS:
            prompt = rng.integers(100, 40_000, n).tolist()
            start = time.perf_counter()
            engine.generate_batch([_request(prompt, adapter, 1)])
            times[n].append(time.perf_counter() - start)
    low, high = (statistics.median(times[n]) for n in _PROMPTS)
    token = (high - low) / (_PROMPTS[1] - _PROMPTS[0])
    return token, max(low - token * _PROMPTS[0], 0.0)


def _hit_s(engine: Engine, n_rounds: int) -> float:
    """Of a token of a prompt that is in the tree."""
    times: dict[int, list[float]] = {n: [] for n in _PROMPTS}
    for n in _PROMPTS:
        prompt = np.random.default_rng(n).integers(100, 40_000, n).tolist()
        for i in range(2 * n_rounds + 1):
            start = time.perf_counter()
            engine.generate_batch([_request(prompt, "adapter-0", 1)])
            if i:
                times[n].append(time.perf_counter() - start)
    low, high = (statistics.median(times[n]) for n in _PROMPTS)
    return max((high - low) / (_PROMPTS[1] - _PROMPTS[0]), 0.0)


async def _serve(
    engine: Engine, trace: Sequence[Arrival], shape: Shape
) -> list[tuple[float, float, float]]:
    """The engine under arrivals: (arrival, first token, end) of each."""
    rng = np.random.default_rng(3)
    prefixes = {i: rng.integers(100, 40_000, shape.n_prefix).tolist() for i in range(-1, 1000)}
    start = time.perf_counter()

    async def one(arrival: Arrival, prompt: list[int]) -> tuple[float, float, float]:
        await asyncio.sleep(max(start + arrival.at - time.perf_counter(), 0.0))
        name = None if arrival.adapter < 0 else f"adapter-{arrival.adapter}"
        stream = await engine.asubmit(_request(prompt, name, shape.n_tokens))
        first = 0.0
        async for _ in stream:
            first = first or time.perf_counter() - start
        return arrival.at, first, time.perf_counter() - start

    prompts = [
        prefixes[each.adapter] + rng.integers(100, 40_000, shape.n_own).tolist() for each in trace
    ]
    return list(await asyncio.gather(*itertools.starmap(one, zip(trace, prompts, strict=True))))


def _request(prompt: list[int], adapter: str | None, n_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    return Request(prompt, {adapter: 1.0} if adapter else None, params)
