"""Times attention over cells against ggml's flash attention, on the same numbers in one run.

Shapes of SmolLM2-135M: 9 query heads over 3 K/V heads of 64 values. Decode: 32 tokens, each with
its own cells in scattered blocks of 32, or all on one shared prompt; ggml reads the same number of
contiguous cells, one stream a token. Prefill: a chunk of tokens of one sequence. Graphs of several
layers, so that K and V come from memory; medians of several passes, the variants in turn. The
unified cells are llama.cpp's other layout: one stream of all sequences' cells, in which a mask
hides from each token those of the others. With one thread, its processor time, so that a busy
machine can be used.

    scripts/bench attention [--threads 2] [--layers 8] [--isa NAME] [--type f16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from benchmarks.targets import Target, verdicts
from loragraph.ggml.handles import (
    F16,
    F32,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
    data_address,
)
from loragraph.ggml.lib import load_library
from loragraph.ggml.ops import Ops
from loragraph.graph.stretches import Stretches
from loragraph.kernels.attention import (
    AttendNode,
    AttentionStep,
    LayerShape,
    ReduceNode,
)
from loragraph.kernels.lowrank import dispatch, forced_dispatch

TYPES = {"f16": F16, "f32": F32, "q8_0": 8}
BLOCK = 32
FLASH, UNIFIED = "flash, own contiguous cells", "flash, unified cells"
CELLS = "cells, own blocks of 32"
_MAX_OVER_OWN, _MIN_OVER_UNIFIED = 1.1, 3.0


class Bench:
    """K and V of `n_layers` layers, filled with random values, and graphs that read them."""

    def __init__(self, lib: Any, shape: LayerShape, n_cells: int, n_layers: int, n_threads: int):
        self.lib, self.shape, self.n_cells, self.n_layers = lib, shape, n_cells, n_layers
        self.backend = CpuBackend(lib, n_threads)
        self.n_threads = n_threads
        self.ctx = TensorContext(lib, 2 * n_layers)
        width = shape.n_head_kv * shape.n_embd_k
        self.k = [self.ctx.new_tensor(shape.k_type, (width, n_cells)) for _ in range(n_layers)]
        self.v = [self.ctx.new_tensor(shape.v_type, (width, n_cells)) for _ in range(n_layers)]
        self.buffer = Buffer.for_tensors(self.ctx)
        rng = np.random.default_rng(0)
        values = rng.standard_normal((n_cells, width), np.float32)
        data = quants.quantize(values, GGMLQuantizationType(shape.k_type)).tobytes()
        for tensor in (*self.k, *self.v):
            lib.ffi.memmove(tensor.ptr.data, data, len(data))
        self.kept: list[Any] = []

    def graph(self, q_ne: Sequence[int], layer: Any) -> tuple[Any, Tensor]:
        """A graph of layer(ops, il, q) for every layer, and its last result."""
        ctx = TensorContext(self.lib, 16 * self.n_layers + 16, 16 * self.n_layers + 16)
        ops, graph = Ops(ctx), self.lib.c.ggml_new_graph_custom(ctx.ptr, 16 * self.n_layers, False)
        inputs = TensorContext(self.lib, 1)
        q = inputs.new_tensor(F32, q_ne)
        memory = Buffer.for_tensors(inputs)
        rng = np.random.default_rng(1)
        array_view(self.lib, q)[:] = rng.standard_normal(int(np.prod(q_ne)), np.float32)
        for il in range(self.n_layers):
            out = layer(ops, il, q)
            self.lib.c.ggml_set_output(out.ptr)
            self.lib.c.ggml_build_forward_expand(graph, out.ptr)
        allocator = GraphAllocator(self.lib)
        allocator.allocate(graph)
        self.kept += [ctx, inputs, memory, allocator]
        return graph, out

    def flash(self, n_kv: int, n_streams: int, mask: NDArray[np.float16]) -> tuple[Any, Tensor]:
        """ggml: mask (streams, n, n_kv) of contiguous cells."""
        shape, n = self.shape, mask.shape[1]
        ctx = TensorContext(self.lib, 1 + 2 * self.n_layers)
        m = ctx.new_tensor(F16, (n_kv, n, 1, n_streams))
        self.kept += [ctx, Buffer.for_tensors(ctx)]
        array_view(self.lib, m)[:] = mask.ravel()

        def layer(ops: Ops, il: int, q: Tensor) -> Tensor:
            k, v = (self._streams(ctx, t, n_kv, n_streams) for t in (self.k[il], self.v[il]))
            q, k, v = (ops.permute(t, 0, 2, 1, 3) for t in (q, k, v))
            return ops.flash_attn(q, k, v, m, shape.scale)

        return self.graph((shape.n_embd_k, shape.n_head, n, n_streams), layer)

    def cells(self, stretches: Stretches, n: int) -> tuple[Any, Tensor]:
        """The native nodes over the same K and V."""
        step = AttentionStep(self.n_threads)
        nodes: list[tuple[AttendNode, Tensor, Tensor]] = []
        shape = self.shape

        def layer(ops: Ops, il: int, q: Tensor) -> Tensor:
            node = AttendNode(step, shape)
            width = shape.n_embd_v * shape.n_head
            k, v = self.k[il], self.v[il]
            out = ops.custom(F32, (width, n), [q, k, v], node.function, node.userdata)
            reduce = ReduceNode(node)
            done = ops.custom_inplace(out, [q], reduce.function, reduce.userdata)
            nodes.append((node, q, out))
            node.bind_cells(data_address(k), k.ptr.nb[1], data_address(v), v.ptr.nb[1])
            return done

        graph, out = self.graph((shape.n_embd_k, shape.n_head, n), layer)
        for node, q, result in nodes:
            node.bind_q(data_address(q), shape.n_embd_k, shape.n_embd_k * shape.n_head)
            node.bind_out(data_address(result), shape.n_embd_v * shape.n_head)
        step.write(stretches, n, self.n_cells)
        self.kept += [step, nodes]
        return graph, out

    def time(self, graph: Any) -> float:
        """Seconds for one pass."""
        clock = time.thread_time if self.n_threads == 1 else time.perf_counter
        start = clock()
        self.backend.compute(graph)
        return clock() - start

    def _streams(self, ctx: TensorContext, cache: Tensor, n_kv: int, n_streams: int) -> Tensor:
        ne = (self.shape.n_embd_k, self.shape.n_head_kv, n_kv, n_streams)
        tensor = ctx.new_tensor(cache.type, ne)
        tensor.ptr.data = cache.ptr.data
        tensor.ptr.buffer = cache.ptr.buffer
        return tensor


def own(n_rows: int, n_own: int, n_cells: int, size: int = BLOCK) -> Stretches:
    """Each row on `n_own` cells of its own, in blocks scattered over the cache."""
    per_row = -(-n_own // size)
    order = np.random.default_rng(2).permutation(n_cells // size)[: n_rows * per_row] * size
    length = np.full(per_row, size)
    length[-1] = n_own - size * (per_row - 1)
    rows = np.arange(n_rows)
    ptr = np.arange(n_rows + 1)
    runs = (ptr * per_row, order, np.tile(length, n_rows), rows * 0)
    parts = (*runs, ptr, rows, rows * 0, rows * 0 + n_own)
    return Stretches(*(part.astype(np.int32) for part in parts))


def shared(n_rows: int, n_shared: int) -> Stretches:
    """All rows on the same cells."""
    rows = np.arange(n_rows)
    parts = ([0, 1], [0], [n_shared], [0], [0, n_rows], rows, rows * 0, rows * 0 + n_shared)
    return Stretches(*(np.asarray(part, np.int32) for part in parts))


def report(
    bench: Bench, title: str, graphs: dict[str, tuple[Any, Tensor]], repeats: int
) -> dict[str, float]:
    """Prints, and gives by name, the median time of each graph; and its ratio to the first's."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + 1):
        for name, (graph, _) in graphs.items():
            seconds = bench.time(graph)
            if i:  # the first pass warms
                times[name].append(seconds)
    print(title)
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    for name, median in medians.items():
        per_layer = 1e3 * median / bench.n_layers
        print(f"  {name:34} {per_layer:8.3f} ms a layer  {median / first:6.3f} x")
    return medians


def unified_mask(n: int, n_own: int) -> NDArray[np.float16]:
    """(1, n, n * n_own): each row sees its own cells of one stream that holds all of them."""
    mask = np.full((n, n, n_own), -np.inf, np.float16)
    mask[np.arange(n), np.arange(n)] = 0
    return mask.reshape(1, n, n * n_own)


def targets(medians: Mapping[str, float]) -> list[Target]:
    """What is asked of blocks of 32 cells, from median times."""
    cells = medians[CELLS]
    return [
        Target(
            "attention over own blocks of 32",
            cells / medians[FLASH],
            "times ggml's over contiguous cells",
            high=_MAX_OVER_OWN,
        ),
        Target(
            "attention over own blocks of 32",
            medians[UNIFIED] / cells,
            "times faster than ggml's over unified cells",
            low=_MIN_OVER_UNIFIED,
        ),
    ]


def decode(lib: Any, shape: LayerShape, arguments: argparse.Namespace) -> None:
    """32 tokens of 32 sequences."""
    n, n_own = arguments.rows, arguments.cells
    bench = Bench(lib, shape, n * (n_own + BLOCK), arguments.layers, arguments.threads)
    graphs = {
        FLASH: bench.flash(n_own, n, np.zeros((n, 1, n_own), np.float16)),
        UNIFIED: bench.flash(n * n_own, 1, unified_mask(n, n_own)),
        CELLS: bench.cells(own(n, n_own, bench.n_cells), n),
        "cells, own contiguous": bench.cells(own(n, n_own, bench.n_cells, n_own), n),
        "cells, own single scattered": bench.cells(own(n, n_own, bench.n_cells, 1), n),
        "cells, one shared prompt": bench.cells(shared(n, n_own), n),
    }
    title = f"decode: {n} rows of {n_own} cells"
    print(verdicts(targets(report(bench, title, graphs, arguments.repeats))))


def prefill(lib: Any, shape: LayerShape, arguments: argparse.Namespace, n: int, past: int) -> None:
    """A chunk of one sequence after `past` cells."""
    bench = Bench(lib, shape, past + n, arguments.layers, arguments.threads)
    hidden = np.arange(past + n)[None, :] > np.arange(past, past + n)[:, None]
    mask = np.where(hidden, np.float16(-np.inf), np.float16(0))[None]
    graphs = {
        "flash": bench.flash(past + n, 1, mask),
        "cells": bench.cells(Stretches.of_one(past, n), n),
    }
    report(bench, f"prompt: {n} tokens after {past}", graphs, arguments.repeats)


def main() -> None:
    """Parses the arguments and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3))
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--type", choices=TYPES, default="f16")
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    type_, size = TYPES[arguments.type], arguments.head_size
    n_head, n_head_kv = arguments.heads
    shape = LayerShape(n_head, n_head_kv, size, size, type_, type_, size**-0.5)
    lib = load_library()
    with forced_dispatch(arguments.isa) if arguments.isa else nullcontext():
        print(f"instruction set: {dispatch()}, {arguments.threads} threads, K and V {type_}")
        decode(lib, shape, arguments)
        for n, past in ((512, 0), (512, 1024), (1, 1000)):
            prefill(lib, shape, arguments, n, past)


if __name__ == "__main__":
    main()
