"""scripts/bench soak: random requests while adapters are loaded, swapped, unloaded and cancelled.

Clients on threads of their own send requests with random mixes to an engine with few cells and few
slots; another thread registers names anew, pins, unloads. Afterwards the counters of what is held
must be zero, and each kept answer must equal what the same request gives alone: greedy text up to
the first position whose two best logits are nearer than twice the bound. Decode speed is compared
with a fresh start.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import loragraph
from loragraph.engine.engine import Engine
from loragraph.errors import CapacityError, DeadlineError, ModelNotFoundError

BOUND = 0.01  # of one logit
_KEPT = 400  # answers that are compared afterwards
_MAX_ADAPTERS = 3  # of one request
_SPEED_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as it ran, and its greedy tokens."""

    prompt: tuple[int, ...]
    adapters: tuple[tuple[int, str, float], ...]  # (version of the file, name, scale)
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Report:
    """What a soak did and found."""

    n_requests: int = 0
    n_finished: int = 0
    n_cancelled: int = 0
    n_refused: int = 0  # for lack of room, of time, or of the name
    n_swaps: int = 0
    n_compared: int = 0  # answers
    n_early: int = 0  # of those, the comparison ended before the last token
    differing: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of kinds that nobody expects
    rss_start: int = 0
    rss_end: int = 0  # KiB
    speed_start: float = 0.0  # tokens/s
    speed_end: float = 0.0


class Soak:
    """`sources` are adapter files; a name's version says which of them it means."""

    def __init__(
        self, base: Path, sources: Sequence[Path], *, seed: int = 0, n_names: int = 12
    ) -> None:
        self.report = Report()
        self._base = base
        self._sources = sources
        self._seed = seed
        self._names = [f"n{i}" for i in range(n_names)]
        self._lock = threading.Lock()
        self._n_prompts = 0
        self._by_generation: dict[int, int] = {}
        self._answers: list[Answer] = []
        self._stop = threading.Event()

    def run(self, seconds: float, *, n_clients: int = 6, n_cells: int = 1024) -> Report:
        """Everything; the engine has a third of the slots that the names would need."""
        with Engine(
            self._base,
            n_ctx=n_cells,
            max_sequences=8,
            max_batch_tokens=64,
            max_adapters=max(_MAX_ADAPTERS, len(self._names) // 3),
            n_threads=1,
        ) as engine:
            for name in self._names:
                self._swap(engine, name, random.Random(name))
            self.report.speed_start = self._speed(engine)
            self.report.rss_start = rss_kib()
            clients = [
                threading.Thread(target=self._client, args=(engine, i)) for i in range(n_clients)
            ]
            threads = [*clients, threading.Thread(target=self._operator, args=(engine,))]
            for thread in threads:
                thread.start()
            time.sleep(seconds)
            self._stop.set()
            for thread in threads:
                thread.join()
            self.report.rss_end = rss_kib()
            self.report.speed_end = self._speed(engine)
            self._check_idle(engine)
            self._compare(engine)
        return self.report

    def _client(self, engine: Engine, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        shared = [rng.randrange(3, 300) for _ in range(30)]
        while not self._stop.is_set():
            prompt = shared[: rng.randrange(1, 30)] if rng.random() < 0.5 else []
            prompt = prompt + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))]
            names = rng.sample(self._names, rng.randrange(_MAX_ADAPTERS + 1))
            adapters = {name: rng.choice([1.0, 0.5, -0.5]) for name in names}
            with self._lock:
                self.report.n_requests += 1
            try:
                self._request(engine, prompt, adapters, rng)
            except (CapacityError, DeadlineError, ModelNotFoundError):
                self._count("n_refused")
            except loragraph.LoragraphError as error:
                with self._lock:
                    self.report.errors.append(f"{type(error).__name__}: {error}")

    def _request(
        self, engine: Engine, prompt: list[int], adapters: dict[str, float], rng: random.Random
    ) -> None:
        deadline = 0.05 if rng.random() < 0.05 else None
        options = loragraph.SamplingParams(
            temperature=0, max_tokens=rng.randrange(1, 40), ignore_eos=True
        )
        stream = engine.stream(prompt, options, adapters=adapters, deadline_s=deadline)
        cancel_after = rng.randrange(20) if rng.random() < 0.2 else None
        with stream:
            for i, _ in enumerate(stream):
                if i == cancel_after:
                    break
            else:
                self._keep(prompt, stream.result)
                return
        self._count("n_cancelled")

    def _keep(self, prompt: list[int], result: loragraph.Result) -> None:
        with self._lock:
            self.report.n_finished += 1
            used = tuple(
                (self._by_generation[use.generation], use.name, use.scale)
                for use in result.adapters
            )
            answer = Answer(tuple(prompt), used, result.tokens)
            if len(self._answers) < _KEPT:
                self._answers.append(answer)
            else:
                self._answers[self.report.n_finished % _KEPT] = answer

    def _operator(self, engine: Engine) -> None:
        rng = random.Random(self._seed)
        while not self._stop.wait(0.02):
            name = rng.choice(self._names)
            try:
                if rng.random() < 0.2:
                    engine.unload_adapter(name)
                elif rng.random() < 0.2:
                    engine.pin(name)
                    engine.unpin(name)
                    continue
                self._swap(engine, name, rng)
                self._count("n_swaps")
            except (CapacityError, ModelNotFoundError):
                continue

    def _swap(self, engine: Engine, name: str, rng: random.Random) -> None:
        version = rng.randrange(len(self._sources))
        with self._lock:
            generation = engine.load_adapter(name, self._sources[version])
            self._by_generation[generation.number] = version

    def _count(self, counter: str) -> None:
        with self._lock:
            setattr(self.report, counter, getattr(self.report, counter) + 1)

    def _speed(self, engine: Engine) -> float:
        """Decoded tokens a second of CPU time, eight requests of the base: the best round."""
        params = loragraph.SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        found = []
        for _ in range(_SPEED_ROUNDS):
            self._n_prompts += 8
            requests = [
                loragraph.Request([3 + i, 3 + self._n_prompts % 300, *range(10, 30)], params=params)
                for i in range(8)
            ]
            start = time.process_time()
            engine.generate_batch(requests)
            found.append(8 * 48 / (time.process_time() - start))
        return max(found)  # what nothing else on the machine slowed

    def _check_idle(self, engine: Engine) -> None:
        stats = engine.stats()
        held = {
            "jobs": stats.core.n_jobs,
            "running": stats.scheduler.n_running,
            "waiting": stats.scheduler.n_waiting,
            "cells in use": stats.scheduler.n_cells_in_use,
            "tickets": stats.pool.n_tickets,
            "adapters in use": stats.pool.n_in_use,
            "loading": stats.pool.n_loading,
        }
        self.report.errors += [f"{name}: {n} are still held" for name, n in held.items() if n]

    def _compare(self, engine: Engine) -> None:
        """Each kept answer against the same request's logits in a context of its own."""
        adapters = [engine.model.load_adapter(path) for path in self._sources]
        with loragraph.Context(engine.model, n_ctx=256, n_threads=1) as context:
            for answer in self._answers:
                context.clear()
                scales: dict[loragraph.Adapter, float] = {}
                for version, _, scale in answer.adapters:
                    adapter = adapters[version]
                    scales[adapter] = scales.get(adapter, 0.0) + scale
                context.set_adapters(scales)
                tokens = [*answer.prompt, *answer.tokens]
                logits = context.decode(tokens)[len(answer.prompt) - 1 : -1]
                self._judge(answer, logits, engine.model.vocab.eog_tokens)

    def _judge(self, answer: Answer, logits: NDArray[np.float32], eog: frozenset[int]) -> None:
        self.report.n_compared += 1
        for row, token in zip(logits, answer.tokens, strict=True):
            row = row.copy()
            row[list(eog)] = -np.inf
            second, best = np.partition(row, -2)[-2:]
            if best - second <= 2 * BOUND:
                self.report.n_early += 1
                return
            if int(row.argmax()) != token:
                self.report.differing.append(answer)
                return


def rss_kib() -> int:
    """Resident KiB of now, or the largest so far where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize() // 1024


def main(argv: Sequence[str] | None = None, write: Callable[[str], None] = print) -> int:
    """Soaks a tiny model, prints the report; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    from tests.tiny import TinyAdapter, TinyLlama

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = TinyLlama()
        base = tiny.write(folder / "base.gguf")
        sources = [folder / f"{i}.gguf" for i in range(8)]
        for i, path in enumerate(sources):
            TinyAdapter(rank=2 + i, seed=i + 1).write(path, tiny)
        soak = Soak(base, sources, seed=args.seed)
        report = soak.run(60 * args.minutes, n_clients=args.clients)
    write(str(report))
    return int(bool(report.errors or report.differing))


if __name__ == "__main__":
    raise SystemExit(main())
