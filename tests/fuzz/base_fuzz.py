"""The long fuzz run of base models: `python -m tests.fuzz.base_fuzz N SEED`.

Exit status 1 after a finding; the files of findings are kept in the working directory as
base-fuzz-SEED-NUMBER.gguf. A finding is anything but a decoded model or a LoragraphError, in
bounded time and memory, from a process that lives.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.base_mutations import Base, bases, spoiled
from tests.fuzz.worker import Worker
from tests.tiny import TinyLlama

SPLIT = TinyLlama(n_layer=1)


def run(n_cases: int, seed: int, keep: Path) -> tuple[Counter[str], list[str]]:
    """Counts of the answers, and the findings; their files are kept in `keep`."""
    rng, models = random.Random(seed), bases()
    counts: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory() as name, Worker("tests.fuzz.base_worker") as worker:
        folder = Path(name)
        for i in range(n_cases):
            path, changed = _case(rng, models, folder)
            answer = worker.check(path)
            counts[answer.split(":")[0]] += 1
            if answer.startswith("BUG"):
                kept = keep / f"base-fuzz-{seed}-{i}.gguf"
                kept.write_bytes(changed.read_bytes())
                findings.append(f"{kept.name}: {answer}")
    return counts, findings


def _case(rng: random.Random, models: list[Base], folder: Path) -> tuple[Path, Path]:
    """Writes one case: the path to load, and that of the file in it that is wrong."""
    if rng.random() < 0.05:
        parts = SPLIT.write_split(folder, 2)
        wrong = rng.choice(parts)
        data = bytearray(wrong.read_bytes())
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(min(len(data), 800))] = rng.choice((0, 1, 255, rng.randrange(256)))
        wrong.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        return parts[0], wrong
    path = folder / "case.gguf"
    path.write_bytes(spoiled(rng, rng.choice(models)))
    return path, path


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
