"""Times the products with base weights against ggml's, on the same numbers in one run.

The seven linear weights of every layer of SmolLM2-135M, so that weights come from memory. Beside
the times stand bytes of weights and operations a second, and what the machine reads and multiplies
(kernel_harness.c). Medians of several passes, the two in turns. With one thread, its processor
time, so that a busy machine can be used.

    python benchmarks/kernel_product.py [--threads 2] [--layers 30] [--type q4_0] [--rows 1 8 32]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants

from benchmarks.kernel_lowrank import load_harness, time_read
from loragraph.ggml.handles import (
    F16,
    F32,
    I8,
    Q4_0,
    Q4_1,
    Q8_0,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
    data_address,
    memory,
)
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.ops import Ops
from loragraph.kernels.library import dispatch
from loragraph.kernels.product import (
    F16ProductNode,
    Layout,
    ProductInputNode,
    ProductNode,
    quantized_size,
)
from loragraph.model.weights import extra_buffer_types

TYPES = {"f16": F16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
LAYOUTS = {Q8_0: Layout.Q8_0, Q4_0: Layout.Q4_0X8, Q4_1: Layout.Q4_1}  # ggml repacks Q4_0
BLOCK_BYTES = {F16: 64, Q8_0: 34, Q4_0: 18, Q4_1: 20}  # of 32 values
N_EMBD, N_KV, N_FF = 576, 192, 1536
# Of a layer, (n_in, n_out of each weight that reads the same x).
LAYER = (
    (N_EMBD, (N_EMBD, N_KV, N_KV)),
    (N_EMBD, (N_EMBD,)),
    (N_EMBD, (N_FF, N_FF)),
    (N_FF, (N_EMBD,)),
)
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


class Bound(NamedTuple):
    """A node, with its x and its y: None where another node of the same kind reads x for it."""

    node: Any
    x: Tensor
    y: Tensor


class Bench:
    """The weights of `n_layers` layers, and graphs that multiply with them."""

    def __init__(self, lib: Any, type_: int, n_layers: int, n_threads: int) -> None:
        self.lib, self.type, self.n_layers, self.n_threads = lib, type_, n_layers, n_threads
        self.backend = CpuBackend(lib, n_threads)
        shapes = [(n_in, n_out) for n_in, n_outs in LAYER for n_out in n_outs]
        self.ctx = TensorContext(lib, n_layers * len(shapes))
        self.weights = [[self.ctx.new_tensor(type_, ne) for ne in shapes] for _ in range(n_layers)]
        buft = repacking_type(lib, self.backend) if type_ == Q4_0 else None
        self.buffer = Buffer.for_tensors(self.ctx, buft)
        rng = np.random.default_rng(0)
        for index, (n_in, n_out) in enumerate(shapes):
            values = rng.standard_normal((n_out, n_in), np.float32) * np.float32(0.02)
            data = quants.quantize(values, GGMLQuantizationType(type_)).tobytes()
            for layer in self.weights:
                lib.c.ggml_backend_tensor_set(layer[index].ptr, data, 0, len(data))
        n_values = n_layers * sum(n_in * n_out for n_in, n_out in shapes)
        self.n_bytes = n_values // 32 * BLOCK_BYTES[type_]
        self.n_flop = 2 * n_values
        self.kept: list[Any] = []

    def graph(self, n_rows: int, multiply: Callable[[Ops, Tensor, Tensor], Tensor]) -> Any:
        """multiply(ops, w, x) with every weight."""
        n_nodes = 16 * self.n_layers
        ctx = TensorContext(self.lib, 2 * n_nodes, n_nodes)
        graph = self.lib.c.ggml_new_graph_custom(ctx.ptr, n_nodes, False)
        inputs = TensorContext(self.lib, 2)
        rng = np.random.default_rng(1)
        x = {n_in: inputs.new_tensor(F32, (n_in, n_rows)) for n_in in (N_EMBD, N_FF)}
        self.kept += [ctx, inputs, Buffer.for_tensors(inputs)]
        for tensor in x.values():
            values = rng.standard_normal(int(np.prod(tensor.ne)), np.float32)
            array_view(self.lib, tensor)[:] = values
        ops = Ops(ctx)
        for layer in self.weights:
            for w in layer:
                y = multiply(ops, w, x[w.ne[0]])
                self.lib.c.ggml_build_forward_expand(graph, y.ptr)
        allocator = GraphAllocator(self.lib)
        allocator.allocate(graph)
        self.kept.append(allocator)
        return graph, y

    def kernel_graph(self, n_rows: int) -> Any:
        """With the native nodes; for int8, x is quantised once for the weights that follow."""
        products: list[Bound] = []
        inputs: list[Bound] = []

        def multiply(ops: Ops, w: Tensor, x: Tensor) -> Tensor:
            n_in, n_out = w.ne[:2]
            if self.type == F16:
                node = F16ProductNode(data_address(w), n_in, n_out, n_rows)
                y = ops.custom(F32, (n_out, n_rows), [x], node.function, node.userdata)
                products.append(Bound(node, x, y))
                return y
            layout = LAYOUTS[self.type]
            if not inputs or inputs[-1].x is not x:
                source = ProductInputNode(n_in, n_rows, layout)
                size = (quantized_size(n_in, n_rows, layout),)
                done = ops.custom(I8, size, [x], source.function, source.userdata)
                inputs.append(Bound(source, x, done))
            done = inputs[-1].y
            product = ProductNode(inputs[-1].node, data_address(w), n_out)
            y = ops.custom(F32, (n_out, n_rows), [done], product.function, product.userdata)
            products.append(Bound(product, x, y))
            return y

        graph, last = self.graph(n_rows, multiply)
        for source, x, done in inputs:
            source.bind(data_address(x), x.ne[0], data_address(done))
        for node, x, y in products:
            if self.type == F16:
                node.bind(data_address(x), x.ne[0], data_address(y), y.ne[0])
            else:
                node.bind(data_address(y), y.ne[0])
        self.kept += [products, inputs]
        return graph, last

    def time(self, graph: Any) -> float:
        """Seconds for one pass."""
        clock = time.thread_time if self.n_threads == 1 else time.perf_counter
        start = clock()
        self.backend.compute(graph)
        return clock() - start


def repacking_type(lib: Library, backend: CpuBackend) -> Any:
    """The buffer type in which ggml repacks Q4_0."""
    (found, *_) = extra_buffer_types(lib, lib.c.ggml_backend_get_device(backend.ptr))
    return found


def report(bench: Bench, n_rows: int, repeats: int) -> None:
    """Medians of both, rates of the kernel, and the ratio."""
    graphs = {
        "ggml": bench.graph(n_rows, lambda ops, w, x: ops.mul_mat(w, x)),
        "kernel": bench.kernel_graph(n_rows),
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, (graph, _) in graphs.items():
            times[name].append(bench.time(graph))
    text = f"{n_rows:5} rows"
    for name, values in times.items():
        median = statistics.median(values)
        flops, stream = n_rows * bench.n_flop / median / 1e9, bench.n_bytes / median / 1e9
        text += f"   {name} {1e3 * median:8.2f} ms {flops:6.1f} GFLOP/s {stream:5.1f} GB/s"
    ratios = [a / b for a, b in zip(times["ggml"], times["kernel"], strict=True)]
    print(f"{text}   {statistics.median(ratios):5.2f} times as fast", flush=True)


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--type", choices=TYPES, default="f16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    bench = Bench(load_library(), TYPES[arguments.type], arguments.layers, arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        harness = load_harness(folder)
        blocks = [
            memory(w.ptr.data, w.ptr.nb[1] * w.ne[1]) for layer in bench.weights for w in layer
        ]
        read = statistics.median(time_read(harness, blocks, arguments.threads) for _ in range(7))
        width = 16 if dispatch() == "avx512" else 8
        peak = statistics.median(harness.lib.bench_fma(2_000_000, width) for _ in range(7))
    print(f"{arguments.type}, {arguments.threads} threads: read-only stream")
    print(f"  {bench.n_bytes / read / 1e9:.1f} GB/s, FMA in registers", end=" ")
    print(f"{arguments.threads * peak / 1e9:.0f} GFLOP/s")
    for n_rows in arguments.rows:
        report(bench, n_rows, arguments.repeats)


if __name__ == "__main__":
    main()
