"""The long fuzz run: `python -m tests.fuzz.adapter_fuzz N SEED`; exit status 1 after a finding.

Spoiled files go through all that reads adapters, in another process; those that found something
are kept in the working directory as adapter-fuzz-SEED-NUMBER.gguf.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.mutations import KINDS, Change, corpus, mutate, odd_file
from tests.fuzz.worker import Worker


def spoiled(rng: random.Random, files: list[bytes]) -> bytes:
    """A random file of the corpus with one to four changes, or a sound one with odd content."""
    if rng.random() < 0.4:
        return odd_file(rng)
    changes = [
        Change(rng.choice(KINDS), rng.random(), rng.getrandbits(32), rng.random() < 0.1)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))
    ]
    return mutate(rng.choice(files), changes)


def run(n_cases: int, seed: int, keep: Path) -> tuple[Counter[str], list[str]]:
    """Counts of the answers, and the findings; their files are kept in `keep`."""
    rng, files = random.Random(seed), corpus()
    counts: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        path = Path(folder) / "case.gguf"
        for i in range(n_cases):
            data = spoiled(rng, files)
            path.write_bytes(data)
            answer = worker.check(path)
            counts[answer.split(":")[0]] += 1
            if answer.startswith("BUG"):
                kept = keep / f"adapter-fuzz-{seed}-{i}.gguf"
                kept.write_bytes(data)
                findings.append(f"{kept.name}: {answer}")
    return counts, findings


def main() -> None:
    """Runs N cases from SEED and writes what came out."""
    n_cases, seed = int(sys.argv[1]), int(sys.argv[2])
    counts, findings = run(n_cases, seed, Path.cwd())
    for answer, n in counts.most_common():
        sys.stdout.write(f"{n:8} {answer}\n")
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
