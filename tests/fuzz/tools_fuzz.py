"""Damaged bases and adapters through the tools that read them and write files.

`python -m tests.fuzz.tools_fuzz N SEED`: only LoragraphError may come out, in bounded time, and no
unfinished file may be left. Findings are kept in the working directory.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType as GGMLType

from loragraph.errors import LoragraphError
from loragraph.tools.combine import combine_files
from loragraph.tools.extract import extract
from loragraph.tools.merge import merge
from loragraph.tools.plan import plan
from loragraph.tools.resize import resize_file
from tests.tiny import TinyAdapter, TinyLlama

_HEADER_BYTES = 3500
_MAX_S = 20.0
_NUMBERS = (
    b"\xff" * 8,
    bytes(8),
    (1 << 40).to_bytes(8, "little"),
    (2**63 - 1).to_bytes(8, "little"),
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, replaced by absurd numbers, or cut off; mostly in the header."""
    out = bytearray(data)
    end = min(len(out), _HEADER_BYTES if rng.random() < 0.7 else len(out))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(4, min(end, len(out)))
        kind = rng.random()
        if kind < 0.5:
            out[at] ^= 1 << rng.randrange(8)
        elif kind < 0.85:
            out[at : at + 8] = rng.choice(_NUMBERS)
        elif at > 64:
            del out[at:]
            end = min(end, at)
    return bytes(out)


def run(n: int, seed: int) -> Counter[str]:
    """Tries `n` pairs of files; raises where anything but LoragraphError comes out."""
    warnings.simplefilter("error")
    rng = random.Random(seed)
    model = TinyLlama(n_layer=1, weight_type=GGMLType.Q8_0, n_vocab=270)
    sound = (model.to_bytes(), TinyAdapter(rank=3).to_bytes(model))
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, adapter, out = folder / "base", folder / "adapter", folder / "out"
        (folder / "sound").write_bytes(sound[0])
        for number in range(n):
            which = rng.randrange(2)
            base.write_bytes(mutated(sound[0], rng) if which == 0 else sound[0])
            adapter.write_bytes(mutated(sound[1], rng) if which == 1 else sound[1])
            kind = rng.choice(("keep", "f16", "q4_0"))
            tools: dict[str, Callable[[], object]] = {
                "merge": lambda kind=kind: merge(base, {adapter: 1.0}, out, type=kind),  # type: ignore[misc]
                "plan": lambda: plan(base, [adapter]),
                "resize": lambda: resize_file(adapter, out, rank=2),
                "combine": lambda: combine_files({adapter: 0.5}, out),
                "extract": lambda: extract(base, folder / "sound", out, rank=2),
            }
            for tool, call in tools.items():
                outcomes[_tried(tool, call, number, base, adapter)] += 1
            assert not list(folder.glob(".*.part"))
    return outcomes


def _tried(tool: str, call: Callable[[], object], number: int, base: Path, adapter: Path) -> str:
    start = time.monotonic()
    finished = False
    try:
        call()
        finished = True
        outcome = "done"
    except LoragraphError as error:
        finished = True
        outcome = type(error).__name__
    finally:
        if not finished or time.monotonic() - start > _MAX_S:
            for path in (base, adapter):
                Path(f"finding-{tool}-{number}-{path.name}.gguf").write_bytes(path.read_bytes())
    assert time.monotonic() - start <= _MAX_S, f"{tool} took too long"
    return f"{tool} {outcome}"


if __name__ == "__main__":
    for line, count in sorted(run(int(sys.argv[1]), int(sys.argv[2])).items()):
        sys.stdout.write(f"{count:6} {line}\n")
