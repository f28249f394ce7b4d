"""Runs steps: keeps graphs by shape, writes their inputs, computes, hands out logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.mix import EMPTY_MIX
from loragraph.engine.row_threads import RowThreads
from loragraph.ggml.handles import (
    I32,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
)
from loragraph.graph.arch import Family
from loragraph.graph.attention.base import Attention, AttentionGraph
from loragraph.graph.batch import Batch
from loragraph.graph.builder import Builder
from loragraph.graph.expert_cache import ExpertCache, WholeStacks
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.kv_cache import CellFormat, KvCache
from loragraph.graph.lowrank.base import GraphLowering, Lowering
from loragraph.graph.products import GgmlProducts, GraphProducts
from loragraph.kernels.sampling import RowCall

MAX_GRAPHS = 16
"""Kept graphs; each holds about half a kilobyte a node, and none holds compute memory."""

_MIN_NODES = 1024
_NODES_PER_TENSOR = 8  # llama.cpp's budget of nodes for a base graph


class ShapeKey(NamedTuple):
    """What decides a graph's structure; all else is input data."""

    n_tokens: int
    n_outputs: int
    n_states: int
    n_kv: int
    lowering: Hashable  # False: no token carries an adapter


@dataclass(slots=True)
class Counters:
    """What happened so far, for tests and reports."""

    n_steps: int = 0
    n_graphs_built: int = 0
    n_graphs_reused: int = 0
    n_graphs_dropped: int = 0
    n_nodes: int = 0  # of the graph computed last
    node_budget: int = 0  # of the graph built last
    compute_bytes: int = 0


@dataclass(slots=True, eq=False)
class KeptGraph:
    """A built graph; its tensors have addresses in the shared compute buffer."""

    ctx: TensorContext
    graph: Any
    logits: Tensor  # F32 [n_vocab, n_logits]; of no meaning where no output has logits
    state: Tensor | None  # F32 [n_embd, n_outputs]; None where no output gives its state
    lowering: GraphLowering  # these four keep the custom nodes' structs alive
    attention: AttentionGraph
    products: GraphProducts
    experts: ExpertCache
    n_nodes: int
    plan: Any = field(init=False)  # making one walks the whole graph
    values: NDArray[np.float32] = field(init=False)  # (n_logits, n_vocab) f32, the logits' memory
    states: NDArray[np.float32] = field(init=False)  # (n_states, n_embd) f32, the states' memory


class Runner:
    """One family, one cache, one lowering on one CPU backend. Used by one thread at a time."""

    def __init__(
        self,
        family: Family,
        n_tensors: int,
        cache: KvCache,
        attention: Attention,
        lowering: Lowering,
        backend: CpuBackend,
        n_batch: int,
        n_ctx: int,
        experts: Callable[[], ExpertCache] = WholeStacks,
        products: Callable[[], GraphProducts] = GgmlProducts,
    ) -> None:
        """Takes cache, lowering and backend over, unless it raises.

        `n_tensors` of the base sets the node budget; `n_ctx` is the room of one sequence. `experts`
        gives a new graph what its base products of experts read, `products` its other products.
        """
        self.counters = Counters()
        self._family = family
        self._n_tensors = n_tensors
        self._n_ctx = n_ctx
        self._experts = experts
        self._cache = cache
        self._attention = attention
        self._lowering = lowering
        self._backend = backend
        self._products = products
        self._lib = backend.lib
        self._graphs: OrderedDict[ShapeKey, KeptGraph] = OrderedDict()
        self.states: NDArray[np.float32] = np.empty((0, 0), np.float32)
        """Of the last step: (n_states, n_embd) f32, borrowed until the next."""
        own = {name: InputSpec(I32, n_batch) for name in ("tokens", "positions", "out_ids")}
        specs = own | dict(attention.specs(n_batch, cache.n_cells))
        with ExitStack() as undo:
            self._allocator = undo.enter_context(GraphAllocator(self._lib))
            self._inputs = Inputs(self._lib, specs)
            undo.callback(self._inputs.close)
            self._row_threads = RowThreads(backend)
            undo.callback(self._row_threads.close)
            self._reserve(n_batch)
            undo.pop_all()

    def run(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]:
        """One step: logits (n_logits, n_vocab) f32; without `copy` borrowed until the next.

        `states` then has what the other outputs gave.
        """
        if batch.n_outputs == 0:  # no graph without a row: one is computed and dropped
            last = np.array([batch.n_tokens - 1], np.int32)
            return self.run(replace(batch, outputs=last), copy=copy)[:0]
        n_kv = self._attention.n_kv(batch, self._cache.n_cells)
        graph = self._graph_for(batch, n_kv)
        self._write(batch, n_kv)
        self._backend.compute(graph.graph, graph.plan)
        self.states = graph.states
        self.counters.n_steps += 1
        self.counters.n_nodes = graph.n_nodes
        return graph.values.copy() if copy else graph.values

    def run_calls(self, calls: Sequence[RowCall]) -> None:
        """Runs passes over rows of logits, in any order, on the threads of the steps."""
        self._row_threads.run(calls)

    def clear_cells(self, first: int) -> None:
        """Zeroes the cells from `first` on."""
        self._cache.clear_from(first)

    def zero_cells(self, cells: NDArray[np.int64]) -> None:
        """Zeroes these cells, (n,) i64."""
        self._cache.zero(cells)

    @property
    def cell_format(self) -> CellFormat:
        """What the bytes of a cell mean."""
        return self._cache.cell_format

    def read_cells(self, cells: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Bytes of these cells, (n,) i64: (n, bytes_per_cell), see KvCache.read."""
        return self._cache.read(cells)

    def write_cells(self, cells: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Fills these cells with what `read_cells` gave."""
        self._cache.write(cells, rows)

    def drop_graphs(self) -> None:
        """Drops every kept graph."""
        while self._graphs:
            self._drop_oldest()

    def close(self) -> None:
        """Frees everything it took over."""
        self.drop_graphs()
        self._allocator.close()
        self._row_threads.close()
        self._inputs.close()
        self._lowering.close()
        self._cache.close()
        self._backend.close()

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of cells, step inputs and compute memory."""
        return {
            "cells": self._cache.nbytes,
            "inputs": self._inputs.nbytes,
            "compute": self._allocator.nbytes,
        }

    def _graph_for(self, batch: Batch, n_kv: int) -> KeptGraph:
        lowering_key = self._lowering.graph_key(batch)
        key = ShapeKey(batch.n_tokens, batch.n_outputs, batch.n_states, n_kv, lowering_key)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.counters.n_graphs_reused += 1
            return graph
        graph = self._build(batch, batch.n_tokens, batch.n_outputs, n_kv)
        self._place(graph)
        graph.plan = self._backend.plan(graph.graph)
        graph.values = self._rows(graph.logits)[: batch.n_logits]
        none = np.empty((0, 0), np.float32)
        graph.states = none if graph.state is None else self._rows(graph.state)[batch.n_logits :]
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._drop_oldest()
        self.counters.n_graphs_built += 1
        self.counters.compute_bytes = self._allocator.nbytes
        return graph

    def _rows(self, tensor: Tensor) -> NDArray[np.float32]:
        """F32 [width, n] as (n, width) f32, its memory."""
        width, n = tensor.ne[:2]
        return array_view(self._lib, tensor).reshape(n, width)

    def _place(self, graph: KeptGraph) -> None:
        """Gives a new graph its memory; all others are dropped where the buffer moved for it."""
        try:
            if self._allocator.allocate(graph.graph):
                self.drop_graphs()  # their addresses are dead
            graph.lowering.bind()
            graph.attention.bind()
            graph.products.bind()
            graph.experts.bind()
        except BaseException:
            self.drop_graphs()
            graph.ctx.close()
            raise

    def _build(self, batch: Batch, n_tokens: int, n_outputs: int, n_kv: int) -> KeptGraph:
        base_nodes = max(_MIN_NODES, _NODES_PER_TENSOR * self._n_tensors)
        n_nodes = base_nodes + self._expert_nodes() + self._lowering.extra_nodes()
        self.counters.node_budget = n_nodes
        ctx = TensorContext(self._lib, n_nodes, n_nodes)
        try:
            graph = self._lib.c.ggml_new_graph_custom(ctx.ptr, n_nodes, False)
            lowering = self._lowering.begin(batch)
            attention = self._attention.begin(ctx, self._inputs, self._cache, n_tokens, n_kv)
            products = self._products()
            experts = self._experts()
            builder = Builder(
                ctx,
                graph,
                lowering,
                attention,
                tokens=self._inputs.tensor(ctx, "tokens", n_tokens),
                positions=self._inputs.tensor(ctx, "positions", n_tokens),
                out_ids=self._inputs.tensor(ctx, "out_ids", n_outputs),
                n_states=batch.n_states,
                products=products,
                n_ctx=self._n_ctx,
                experts=experts,
            )
            logits = self._family.build(builder)
            for output in (builder.state, logits):
                if output is not None:
                    self._lib.c.ggml_set_output(output.ptr)
                    self._lib.c.ggml_build_forward_expand(graph, output.ptr)
        except BaseException:
            ctx.close()
            raise
        n_made = self._lib.c.ggml_graph_n_nodes(graph)
        parts = (lowering, attention, products, experts)
        return KeptGraph(ctx, graph, logits, builder.state, *parts, n_made)

    def _expert_nodes(self) -> int:
        """Nodes that add up what a token's experts gave: a view and a sum each."""
        hparams = self._family.hparams
        return 0 if hparams.experts is None else 2 * hparams.experts.n_used * hparams.n_layer

    def _write(self, batch: Batch, n_kv: int) -> None:
        """Writes every input of the step: what stays unwritten would be the last step's."""
        self._inputs.view("tokens", batch.n_tokens)[:] = batch.tokens
        self._inputs.view("positions", batch.n_tokens)[:] = batch.positions
        self._inputs.view("out_ids", batch.n_outputs)[:] = batch.outputs
        self._attention.write(self._inputs, self._cache, batch, n_kv)
        self._lowering.write(batch)

    def _reserve(self, n_batch: int) -> None:
        """Sizes the compute buffer for the largest base graph; adapters add little to it."""
        indices = np.arange(n_batch, dtype=np.int32)
        widest = Batch.of_one(indices, 0, EMPTY_MIX, indices)
        graph = self._build(widest, n_batch, n_batch, self._cache.n_cells)
        with graph.ctx:
            self._allocator.reserve(graph.graph)

    def _drop_oldest(self) -> None:
        _, graph = self._graphs.popitem(last=False)
        graph.ctx.close()
        self.counters.n_graphs_dropped += 1
