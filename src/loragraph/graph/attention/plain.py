"""Attention by matrix products and softmax: with F32 cells the exact mode of comparisons."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from loragraph.ggml.handles import F32, I64, Tensor, TensorContext
from loragraph.ggml.ops import Ops
from loragraph.graph.attention.base import (
    Form,
    mask_name,
    mask_specs,
    masked_n_kv,
    write_masks,
)
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.kv_cache import KvCache


class PlainAttention:
    """softmax(K q) V with V stored transposed; `widths` are the widths of the layers' V."""

    v_transposed = True

    def __init__(self, widths: frozenset[int], windows: Collection[int] = (0,)) -> None:
        self._widths = widths
        self._windows = windows

    def specs(self, n_batch: int, n_cells: int) -> Mapping[str, InputSpec]:
        """Cell indices, an index for every value of V, the masks F32 [n_kv, n_tokens]."""
        masks = mask_specs(F32, self._windows, n_batch, n_cells)
        specs = {"cells": InputSpec(I64, n_batch), **masks}
        return specs | {f"v_cells_{w}": InputSpec(I64, n_batch * w) for w in self._widths}

    def n_kv(self, batch: Batch, n_cells: int) -> int:
        """Whole quanta of cells."""
        return masked_n_kv(batch, n_cells)

    def begin(
        self, ctx: TensorContext, inputs: Inputs, cache: KvCache, n_tokens: int, n_kv: int
    ) -> _Graph:
        """Declares its inputs."""
        cells = inputs.tensor(ctx, "cells", n_tokens)
        masks = {w: inputs.tensor(ctx, mask_name(w), n_kv, n_tokens) for w in self._windows}
        values = {w: inputs.tensor(ctx, f"v_cells_{w}", n_tokens * w) for w in self._widths}
        return _Graph(cache, cells, values, masks, n_kv)

    def write(self, inputs: Inputs, cache: KvCache, batch: Batch, n_kv: int) -> None:
        """Fills its inputs: value j of token t goes to j * n_cells + cell(t)."""
        inputs.view("cells", batch.n_tokens)[:] = batch.cells
        for w in self._widths:
            index = batch.cells[:, None] + np.arange(w)[None, :] * cache.n_cells
            inputs.view(f"v_cells_{w}", batch.n_tokens * w)[:] = index.ravel()
        write_masks(inputs, batch, self._windows, n_kv)


@dataclass(frozen=True, slots=True)
class _Graph:
    cache: KvCache
    cells: Tensor  # I64 [n_tokens]
    value_cells: Mapping[int, Tensor]  # I64 [n_tokens * n_embd_v] by n_embd_v
    masks: Mapping[int, Tensor]  # F32 [n_kv, n_tokens] by window
    n_kv: int

    def layer(
        self, ops: Ops, il: int, q: Tensor, k: Tensor, v: Tensor, form: Form
    ) -> tuple[Tensor, list[Tensor]]:
        k_cache, n_tokens = self.cache.k[il], q.ne[2]
        writes = [ops.set_rows(k_cache, ops.rows(k), self.cells)]
        if not self.cache.v_in_k:
            writes.append(self._write_v(ops, self.cache.v[il], v))
        k_read = ops.permute(self._read_k(ops, k_cache, k.ne[0]), 0, 2, 1, 3)
        scores = ops.mul_mat(k_read, ops.permute(q, 0, 2, 1, 3))  # [n_kv, n_tokens, n_head]
        ops.accumulate_in_f32(scores)
        scale = form.scale
        if form.softcap:
            scores = ops.tanh(ops.scale(scores, scale / form.softcap))
            scores, scale = ops.scale(scores, form.softcap), 1.0
        weights = ops.soft_max(scores, self.masks[form.window], scale)
        if form.sinks is not None:
            ops.add_sinks(weights, form.sinks)
        out = ops.mul_mat(self._read_v(ops, il, v.ne[0]), weights)
        return ops.cont_2d(ops.permute(out, 0, 2, 1, 3), v.ne[0] * q.ne[1], n_tokens), writes

    def bind(self) -> None:
        """No custom nodes."""

    def _write_v(self, ops: Ops, cache: Tensor, v: Tensor) -> Tensor:
        flat = ops.view(cache, (1, cache.ne[0] * cache.ne[1]), (self._bytes(ops, 1),))
        return ops.set_rows(flat, ops.cont_row(v), self.value_cells[cache.ne[1]])

    def _read_k(self, ops: Ops, cache: Tensor, n_embd_head: int) -> Tensor:
        strides = (self._bytes(ops, n_embd_head), self._bytes(ops, cache.ne[0]))
        return ops.view(cache, (n_embd_head, cache.ne[0] // n_embd_head, self.n_kv), strides)

    def _read_v(self, ops: Ops, il: int, n_embd_head: int) -> Tensor:
        """[n_kv, hd, n_head_kv] of the transposed cache, or turned over where V lies in K."""
        if self.cache.v_in_k:
            k = self.cache.k[il]
            both = ops.view(k, (n_embd_head, self.n_kv), (self._bytes(ops, k.ne[0]),))
            return ops.cont_2d(ops.permute(both, 1, 0, 2, 3), self.n_kv, n_embd_head)
        cache = self.cache.v[il]
        n_cells, width = cache.ne[0], cache.ne[1]
        strides = (self._bytes(ops, n_cells), self._bytes(ops, n_cells * n_embd_head))
        return ops.view(cache, (self.n_kv, n_embd_head, width // n_embd_head), strides)

    def _bytes(self, ops: Ops, n: int) -> int:
        return int(ops.lib.c.ggml_row_size(self.cache.type, n))
