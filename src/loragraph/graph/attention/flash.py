"""ggml's flash attention over the cells in use, with an F16 mask for each window."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loragraph.ggml.handles import F16, I64, Tensor, TensorContext
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


class FlashAttention:
    """Default on every backend; K and V are stored alike."""

    v_transposed = False

    def __init__(self, windows: Collection[int] = (0,)) -> None:
        self._windows = windows

    def specs(self, n_batch: int, n_cells: int) -> Mapping[str, InputSpec]:
        """Cell indices I64 [n_tokens] and the masks F16 [n_kv, n_tokens]."""
        masks = mask_specs(F16, self._windows, n_batch, n_cells)
        return {"cells": InputSpec(I64, n_batch), **masks}

    def n_kv(self, batch: Batch, n_cells: int) -> int:
        """Whole quanta of cells."""
        return masked_n_kv(batch, n_cells)

    def begin(
        self, ctx: TensorContext, inputs: Inputs, cache: KvCache, n_tokens: int, n_kv: int
    ) -> _Graph:
        """Declares cell indices and masks."""
        cells = inputs.tensor(ctx, "cells", n_tokens)
        masks = {w: inputs.tensor(ctx, mask_name(w), n_kv, n_tokens) for w in self._windows}
        return _Graph(cache, cells, masks, n_kv)

    def write(self, inputs: Inputs, cache: KvCache, batch: Batch, n_kv: int) -> None:
        """Fills cell indices and masks."""
        inputs.view("cells", batch.n_tokens)[:] = batch.cells
        write_masks(inputs, batch, self._windows, n_kv)


@dataclass(frozen=True, slots=True)
class _Graph:
    cache: KvCache
    cells: Tensor  # I64 [n_tokens]
    masks: Mapping[int, Tensor]  # F16 [n_kv, n_tokens] by window
    n_kv: int

    def layer(
        self, ops: Ops, il: int, q: Tensor, k: Tensor, v: Tensor, form: Form
    ) -> tuple[Tensor, list[Tensor]]:
        n_tokens = q.ne[2]
        k_cells = self.cache.k[il]
        v_cells = k_cells if self.cache.v_in_k else self.cache.v[il]
        writes = [ops.set_rows(k_cells, ops.rows(k), self.cells)]
        if not self.cache.v_in_k:
            writes.append(ops.set_rows(v_cells, ops.rows(v), self.cells))
        out = ops.flash_attn(
            ops.permute(q, 0, 2, 1, 3),
            self._read(ops, k_cells, k.ne[0], k.ne[1]),
            self._read(ops, v_cells, v.ne[0], v.ne[1]),
            self.masks[form.window],
            form.scale,
            form.softcap,
        )
        ops.accumulate_in_f32(out)
        if form.sinks is not None:
            ops.add_sinks(out, form.sinks)
        return ops.reshape(out, v.ne[0] * q.ne[1], n_tokens), writes

    def bind(self) -> None:
        """No custom nodes."""

    def _read(self, ops: Ops, cache: Tensor, n_embd_head: int, heads: int) -> Tensor:
        """The cells in use as [hd, n_kv, n_head_kv]."""
        size = ops.lib.c.ggml_row_size
        strides = (size(cache.type, n_embd_head), size(cache.type, cache.ne[0]))
        view = ops.view(cache, (n_embd_head, heads, self.n_kv), strides)
        return ops.permute(view, 0, 2, 1, 3)
