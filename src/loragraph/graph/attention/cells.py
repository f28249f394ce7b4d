"""Attention over lists of cells, by two custom nodes a layer: no mask, and no walk over all cells.

What a token sees is input data alone, so a graph's shape does not depend on the cells in use, and
cells that many tokens share are read once. Only on the CPU backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loragraph.ggml.handles import F32, I64, Tensor, TensorContext, data_address
from loragraph.ggml.ops import Ops
from loragraph.graph.attention.base import Form, seen_through
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.kv_cache import KvCache
from loragraph.kernels.attention import AttendNode, AttentionStep, LayerShape, ReduceNode


class CellsAttention:
    """One plan a step and window, which all such layers and all kept graphs read; K and V are
    stored alike."""

    v_transposed = False

    def __init__(self, n_threads: int, windows: Collection[int] = (0,)) -> None:
        """`n_threads` of the backend: each needs scratch of its own."""
        self._steps = {window: AttentionStep(n_threads) for window in windows}

    def specs(self, n_batch: int, n_cells: int) -> Mapping[str, InputSpec]:
        """Cell indices I64 [n_tokens]; what rows see stands outside the graph."""
        return {"cells": InputSpec(I64, n_batch)}

    def n_kv(self, batch: Batch, n_cells: int) -> int:
        """All cells: the same for every step."""
        return n_cells

    def begin(
        self, ctx: TensorContext, inputs: Inputs, cache: KvCache, n_tokens: int, n_kv: int
    ) -> _Graph:
        """Declares the cell indices."""
        return _Graph(self._steps, cache, inputs.tensor(ctx, "cells", n_tokens))

    def write(self, inputs: Inputs, cache: KvCache, batch: Batch, n_kv: int) -> None:
        """Fills the cell indices and plans the step."""
        inputs.view("cells", batch.n_tokens)[:] = batch.cells
        for window, seen in seen_through(batch, self._steps):
            self._steps[window].write(seen, batch.n_tokens, cache.n_cells)


class _Graph:
    """The custom nodes of one graph; keeps their structs alive as long as the graph."""

    def __init__(self, steps: Mapping[int, AttentionStep], cache: KvCache, cells: Tensor) -> None:
        self._steps = steps
        self._cache = cache
        self._cells = cells  # I64 [n_tokens]
        self._nodes: list[tuple[AttendNode, ReduceNode, Tensor, Tensor]] = []

    def layer(
        self, ops: Ops, il: int, q: Tensor, k: Tensor, v: Tensor, form: Form
    ) -> tuple[Tensor, list[Tensor]]:
        n_tokens = q.ne[2]
        k_cache = self._cache.k[il]
        v_cache = k_cache if self._cache.v_in_k else self._cache.v[il]
        k_cells = v_cells = ops.set_rows(k_cache, ops.rows(k), self._cells)
        if not self._cache.v_in_k:
            v_cells = ops.set_rows(v_cache, ops.rows(v), self._cells)
        heads = (q.ne[1], k.ne[1], k.ne[0], v.ne[0])
        attend = AttendNode(
            self._steps[form.window],
            LayerShape(*heads, k_cells.type, v_cells.type, form.scale, form.softcap),
        )
        reduce = ReduceNode(attend)
        # With the writes as sources they are computed before; so no write need be taken in by hand.
        out = ops.custom(
            F32,
            (v.ne[0] * q.ne[1], n_tokens),
            [q, k_cells, v_cells],
            attend.function,
            attend.userdata,
        )
        done = ops.custom_inplace(out, [q], reduce.function, reduce.userdata)
        self._nodes.append((attend, reduce, q, out))
        attend.bind_cells(
            data_address(k_cache), k_cache.ptr.nb[1], data_address(v_cache), v_cache.ptr.nb[1]
        )
        if form.sinks is not None:
            attend.bind_sinks(data_address(form.sinks))
        return done, []

    def bind(self) -> None:
        for attend, _, q, out in self._nodes:
            attend.bind_q(data_address(q), q.ptr.nb[1] // 4, q.ptr.nb[2] // 4)
            attend.bind_out(data_address(out), out.ptr.nb[1] // 4)
