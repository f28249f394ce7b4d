"""Runs fuzz cases in worker processes, so that a crash or a hang is a finding and not the end.

A case is a function of a random generator. It may raise LoragraphError; any other exception, a
dead worker, or one that ran out of time or memory is a failure, reported with the case's number.
"""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

from loragraph.errors import LoragraphError

Case = Callable[[random.Random], None]

_BATCH = 200
_CASE_S = 30  # of processor time
_SLEEP_S = 600  # of the clock
_WORKER_BYTES = 6 << 30


def generator(seed: int, index: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{seed}:{index}")


def run_case(case: Case, seed: int, index: int) -> str:
    """Runs one case here; the name of the error it ended with, or "accepted"."""
    try:
        case(generator(seed, index))
    except LoragraphError as exc:
        return type(exc).__name__
    return "accepted"


def main(script: str, case: Case) -> int:
    """`SCRIPT N SEED`: runs N cases; exit status 1 where one failed."""
    if sys.argv[1] == "--worker":
        return _work(case, *map(int, sys.argv[2:5]))
    n, seed = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    failures: list[str] = []
    at = 0
    while at < n:
        at = _supervise(script, seed, at, min(at + _BATCH, n), counts, failures)
    _say(f"{n} cases, seed {seed}: {dict(counts.most_common())}, {len(failures)} failures")
    for failure in failures:
        _say(failure)
    return 1 if failures else 0


def _supervise(
    script: str, seed: int, start: int, stop: int, counts: Counter[str], failures: list[str]
) -> int:
    command = [sys.executable, script, "--worker", str(start), str(stop), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("case ")]
    finished = [line for line in lines if len(line) == 3]
    counts.update(line[2] for line in finished)
    if done.returncode == 0:
        return stop
    index = start + len(finished)
    tail = " | ".join(done.stderr.strip().splitlines()[-3:])
    failures.append(f"case {index} of seed {seed}: worker ended with {done.returncode}: {tail}")
    return index + 1


def _work(case: Case, start: int, stop: int, seed: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)  # ends a worker that hangs inside C, too
    for index in range(start, stop):
        signal.setitimer(signal.ITIMER_PROF, _CASE_S)
        signal.alarm(_SLEEP_S)
        _say(f"case {index} {run_case(case, seed, index)}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
