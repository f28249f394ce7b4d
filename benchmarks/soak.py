"""scripts/bench soak: random requests while adapters are loaded, swapped, unloaded and cancelled.

Clients on threads of their own send requests of all kinds (mixes, aLoRAs, greedy and seeded
choices, grammars, several choices, salts) to an engine with few cells, so that sequences are
preempted, and few slots; another thread registers names anew, pins, unloads. Afterwards nothing may
be held, memory must be what it was, every answer must equal what the same request gives alone, and
decoding must be as fast as in a fresh engine, which takes turns with the old one.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import loragraph
from benchmarks.soak_alone import Alone
from benchmarks.soak_requests import INVOCATIONS, MAX_ADAPTERS, Kind, make_kinds
from loragraph.engine.engine import Engine
from loragraph.errors import CapacityError, DeadlineError, ModelNotFoundError

MIN_SPEED = 0.9  # of a fresh engine's
MAX_GROWTH_KIB = 8 * 1024  # of resident memory between the end of the warming up and the end
MAX_EARLY = 0.02  # of the answers differ from the lone ones, where the choice was open
MAX_REFUSED = 0.1  # of the requests: a twentieth has hardly any time, and names come and go
_WARM = 0.2  # of the time: every kind of request has been there, and every thread's memory
_SPEED_ROUNDS = 41
_LEAST = 50  # finished requests
_PATIENCE_S = 120.0  # for the first ones of everything, and for what runs at the end


@dataclass(slots=True)
class Report:
    """What a soak did and found."""

    n_requests: int = 0
    n_finished: int = 0
    n_cancelled: int = 0
    n_refused: int = 0  # for lack of room, of time, or of the name
    n_swaps: int = 0
    n_preemptions: int = 0
    n_evictions: int = 0  # of adapters
    n_kinds: int = 0  # unlike requests, by their adapters' files too
    n_compared: int = 0  # texts: all of all answers
    n_early: int = 0  # of those, unlike the lone one from an open choice on
    compare_s: float = 0.0
    rss_start: int = 0
    rss_end: int = 0  # KiB
    speed_fresh: float = 0.0  # tokens a second of CPU time
    speed_end: float = 0.0
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of requests, of kinds that nobody expects
    problems: list[str] = field(default_factory=list)  # of anything else

    def faults(self) -> list[str]:
        """What is wrong with it; the speed only where it was measured."""
        found = [*self.errors, *self.problems, *self.differing]
        ended = self.n_finished + self.n_cancelled + self.n_refused + len(self.errors)
        if ended < self.n_requests:
            found.append(f"{self.n_requests - ended} requests were lost")
        if self.n_refused > MAX_REFUSED * self.n_requests:
            found.append(f"{self.n_refused} of {self.n_requests} requests were refused")
        if not self.n_preemptions:
            found.append("nothing was preempted: too many cells")
        if not self.n_compared or self.n_early > MAX_EARLY * self.n_compared:
            found.append(f"{self.n_early} of {self.n_compared} comparisons ended early")
        growth = self.rss_end - self.rss_start
        if growth > MAX_GROWTH_KIB:
            found.append(f"memory grew by {growth} KiB, expected at most {MAX_GROWTH_KIB}")
        if self.speed_end < MIN_SPEED * self.speed_fresh:
            found.append(
                f"{self.speed_end:.0f} tokens/s, {self.speed_fresh:.0f} in a fresh engine: "
                f"expected at least {MIN_SPEED} of that"
            )
        return found


class Soak:
    """`plain` and `activated` are adapter files; a name means one of two of them at a time.

    `n_kinds` unlike requests, times the files that their names may mean, bound how many there are
    to be computed alone afterwards.
    """

    def __init__(
        self,
        base: Path,
        plain: Sequence[Path],
        activated: Sequence[Path],
        *,
        seed: int = 0,
        n_kinds: int = 600,
        n_threads: int = 2,
    ) -> None:
        self.report = Report()
        self._n_threads = n_threads
        self._base = base
        self._seed = seed
        self._files = {f"n{i}": _two(plain, i) for i in range(9)}
        names = list(self._files)
        self._files |= {f"x{i}": _two(activated, i) for i in range(3)}
        self._names = list(self._files)
        self._kinds = make_kinds(n_kinds, names, self._names[len(names) :], seed)
        self._lock = threading.Lock()
        self._versions: dict[int, int] = {}  # generation -> which of its name's two files
        self._answers: dict[tuple[int, tuple[int, ...]], dict[tuple[bytes, ...], int]] = {}
        self._stop = threading.Event()

    def run(
        self, seconds: float, *, n_clients: int = 6, n_cells: int = 256, measure: bool = True
    ) -> Report:
        """Everything; the engine has a third of the slots that the names would need."""
        with loragraph.Model.load(self._base, n_threads=self._n_threads) as model:
            with self._engine(model, n_cells) as engine:
                self._load(engine, seconds, n_clients)
                stats = engine.stats()
                self.report.n_preemptions = stats.scheduler.n_preemptions
                self.report.n_evictions = stats.pool.n_evictions
                self._check_idle(engine)
                if measure:
                    self._measure(engine, model, n_cells)
                self._check_unloaded(engine)
            self._compare(model)
        return self.report

    def _engine(self, model: loragraph.Model, n_cells: int) -> Engine:
        """One with all names registered."""
        engine = Engine(
            model,
            n_ctx=n_cells,
            max_sequences=8,
            max_batch_tokens=64,
            max_adapters=max(MAX_ADAPTERS, len(self._names) // 3),
            n_threads=self._n_threads,
        )
        for name in self._names:
            self._swap(engine, name, 0)
        return engine

    # -- the load ---------------------------------------------------------------------------------

    def _load(self, engine: Engine, seconds: float, n_clients: int) -> None:
        workers = [(self._client, i) for i in range(n_clients)] + [(self._operator, -1)]
        threads = [
            threading.Thread(target=work, args=(engine, number), daemon=True)
            for work, number in workers
        ]
        for thread in threads:
            thread.start()
        time.sleep(_WARM * seconds)
        self.report.rss_start = rss_kib()
        time.sleep((1 - _WARM) * seconds)
        until = time.monotonic() + _PATIENCE_S
        while not self._has_seen_all(engine) and time.monotonic() < until:
            time.sleep(0.05)
        if not self._has_seen_all(engine):
            self.report.problems.append("too little was finished, cancelled, swapped or preempted")
        self._stop.set()
        until = time.monotonic() + _PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.report.errors.append(f"a request still ran after {_PATIENCE_S:.0f} s")
        self.report.rss_end = rss_kib()

    def _has_seen_all(self, engine: Engine) -> bool:
        """Whether enough of everything happened, which takes longer on a busy machine."""
        seen = self.report
        return (
            seen.n_finished >= _LEAST
            and min(seen.n_cancelled, seen.n_swaps, engine.stats().scheduler.n_preemptions) > 0
        )

    def _client(self, engine: Engine, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        while not self._stop.is_set():
            self._count("n_requests")
            try:
                self._request(engine, rng.randrange(len(self._kinds)), rng)
            except (CapacityError, DeadlineError, ModelNotFoundError):
                self._count("n_refused")
            except loragraph.LoragraphError as error:
                with self._lock:
                    self.report.errors.append(f"{type(error).__name__}: {error}")

    def _request(self, engine: Engine, number: int, rng: random.Random) -> None:
        request = self._kinds[number].request(0.05 if rng.random() < 0.05 else None)
        stream = engine.open(request)
        cancel_after = rng.randrange(20) if rng.random() < 0.2 else None
        with stream:
            for i, _ in enumerate(stream):
                if i == cancel_after:
                    break
            else:
                self._keep(number, stream.result)
                return
        self._count("n_cancelled")

    def _keep(self, number: int, result: loragraph.Result) -> None:
        with self._lock:
            self.report.n_finished += 1
            version = {use.name: self._versions[use.generation] for use in result.adapters}
            files = tuple(version[name] for name, _ in self._kinds[number].adapters)
            texts = tuple(_packed(choice) for choice in result.choices)
            found = self._answers.setdefault((number, files), {})
            found[texts] = found.get(texts, 0) + 1

    def _operator(self, engine: Engine, _number: int) -> None:
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
                self._swap(engine, name, rng.randrange(2))
                self._count("n_swaps")
            except (CapacityError, ModelNotFoundError):
                continue
            except loragraph.LoragraphError as error:
                with self._lock:
                    self.report.problems.append(f"operator: {type(error).__name__}: {error}")

    def _swap(self, engine: Engine, name: str, version: int) -> None:
        with self._lock:
            generation = engine.load_adapter(name, self._files[name][version])
            self._versions[generation.number] = version

    def _count(self, counter: str) -> None:
        with self._lock:
            setattr(self.report, counter, getattr(self.report, counter) + 1)

    # -- what is left -----------------------------------------------------------------------------

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

    def _check_unloaded(self, engine: Engine) -> None:
        """Without names no adapter is in memory."""
        for row in engine.adapters:
            engine.unload_adapter(row.name)
        n_bytes, n_open = engine.stats().pool.nbytes, len(engine.model.adapters)
        if n_bytes or n_open:
            self.report.errors.append(f"{n_open} adapters, {n_bytes} bytes are left of no name")

    def _measure(self, engine: Engine, model: loragraph.Model, n_cells: int) -> None:
        """Median speeds of the old engine and of a fresh one, in turns."""
        for name in self._names:
            self._swap(engine, name, 0)
        with self._engine(model, n_cells) as fresh:
            pair = (engine, fresh)
            speeds: dict[Engine, list[float]] = {one: [] for one in pair}
            for number in range(-1, _SPEED_ROUNDS):
                for one in pair if number % 2 else pair[::-1]:
                    speed = _speed(one, number)
                    if number >= 0:  # the one before loads the adapters
                        speeds[one].append(speed)
            self.report.speed_end = statistics.median(speeds[engine])
            self.report.speed_fresh = statistics.median(speeds[fresh])

    def _compare(self, model: loragraph.Model) -> None:
        """Every answer against the same request's in a context of its own."""
        start = time.monotonic()
        paths = sorted({path for files in self._files.values() for path in files})
        adapters = {path: model.load_adapter(path) for path in paths}
        with loragraph.Context(model, n_ctx=256, n_threads=1) as context:
            alone = Alone(context)
            for (number, files), answers in sorted(self._answers.items()):
                kind = self._kinds[number]
                scales = [
                    (adapters[self._files[name][file]], scale)
                    for (name, scale), file in zip(kind.adapters, files, strict=True)
                ]
                alone.read(kind, scales)
                for index in range(kind.n):
                    self._judge(alone, kind, index, answers)
        self.report.n_kinds = len(self._answers)
        self.report.compare_s = time.monotonic() - start

    def _judge(
        self, alone: Alone, kind: Kind, index: int, answers: dict[tuple[bytes, ...], int]
    ) -> None:
        """One choice of all answers to one request."""
        tokens, rows = alone.choice(index)
        for texts, n in answers.items():
            got = array("i", texts[index]).tolist()
            self.report.n_compared += n
            if got == tokens:
                continue
            pairs = enumerate(zip(got, tokens, strict=False))
            at = next((i for i, (one, other) in pairs if one != other), None)
            if at is not None and alone.is_open(index, rows[: at + 1], tokens[:at], got[at]):
                self.report.n_early += n
            else:
                self.report.differing.append(f"{kind}, choice {index}: {got}, alone {tokens}")


def _two(files: Sequence[Path], i: int) -> tuple[Path, Path]:
    return files[i % len(files)], files[(i + 1) % len(files)]


def _packed(choice: loragraph.Choice) -> bytes:
    """Its tokens and the one that ended it, in little memory."""
    end = [] if choice.stop_token is None else [choice.stop_token]
    return array("i", [*choice.tokens, *end]).tobytes()


def _speed(engine: Engine, number: int) -> float:
    """Decoded tokens a second of CPU time: two requests of the base, two with an adapter."""
    params = loragraph.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [
        loragraph.Request([3 + i, 4 + number, *range(10, 16)], adapters, params=params)
        for i, adapters in enumerate([{}, {"n0": 1.0}, {}, {"n1": 0.5, "n2": 1.0}])
    ]
    start = time.process_time()
    engine.generate_batch(requests)
    return len(requests) * 40 / (time.process_time() - start)


def rss_kib() -> int:
    """Resident KiB of now, or the largest so far where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize() // 1024


def tiny_soak(folder: Path, *, seed: int = 0, n_kinds: int = 600, n_threads: int = 2) -> Soak:
    """One of a tiny base and adapters of unlike ranks, written to a folder."""
    from tests.tiny import TinyAdapter, TinyLlama

    tiny = TinyLlama()
    base = tiny.write(folder / "base.gguf")
    plain = [folder / f"{i}.gguf" for i in range(6)]
    for i, path in enumerate(plain):
        TinyAdapter(rank=2 + i, seed=i + 1).write(path, tiny)
    activated = [folder / f"alora{i}.gguf" for i in range(len(INVOCATIONS))]
    for i, path in enumerate(activated):
        adapter = TinyAdapter(rank=3 + i, seed=10 + i, invocation_tokens=INVOCATIONS[i])
        adapter.write(path, tiny)
    return Soak(base, plain, activated, seed=seed, n_kinds=n_kinds, n_threads=n_threads)


def main(argv: Sequence[str] | None = None, write: Callable[[str], None] = print) -> int:
    """Soaks a tiny model, prints the report and its faults; 1 where there are any."""
    parser = argparse.ArgumentParser(prog="scripts/bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--kinds", type=int, default=600, help="unlike requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        soak = tiny_soak(Path(name), seed=args.seed, n_kinds=args.kinds, n_threads=args.threads)
        report = soak.run(60 * args.minutes, n_clients=args.clients, n_cells=args.cells)
    for one in fields(report):
        value = getattr(report, one.name)
        if not isinstance(value, list):
            write(
                f"{one.name}: {value:.1f}" if isinstance(value, float) else f"{one.name}: {value}"
            )
    faults = report.faults()
    write("\n".join(faults) or "no faults")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
