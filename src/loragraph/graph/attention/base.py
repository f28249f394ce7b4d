"""The contract of an attention, and what the two masked ones share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from loragraph.ggml.handles import Tensor, TensorContext
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.kv_cache import KvCache
from loragraph.graph.stretches import mask_from

CELL_QUANTUM = 256
"""The number of cells a graph walks is a multiple of this, so that it stays valid for a while."""


def masked_n_kv(batch: Batch, n_cells: int) -> int:
    """Cells that a masked graph walks: up to the last one seen, in whole quanta of `n_cells`."""
    n_used = batch.stretches.end_cell
    return min(n_cells, max(CELL_QUANTUM, -(-n_used // CELL_QUANTUM) * CELL_QUANTUM))


class AttentionGraph(Protocol):
    """Attention in one graph: inputs are declared once, then one call a layer."""

    def layer(
        self, ops: Ops, il: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, list[Tensor]]:
        """q, k, v F32 [hd, n_head(_kv), n_tokens] -> F32 [hd * n_head, n_tokens].

        Also the nodes that write K and V where nothing refers to them: the graph must take them in
        first, by hand.
        """

    def bind(self) -> None:
        """Tells custom nodes the addresses that the graph's tensors have got."""


class Attention(Protocol):
    """A way to attend: what inputs it needs, its part of a graph, its part of a step."""

    v_transposed: bool

    def specs(self, n_batch: int, n_cells: int) -> Mapping[str, InputSpec]:
        """The step inputs that it needs at most."""

    def n_kv(self, batch: Batch, n_cells: int) -> int:
        """The cells that a graph for this step walks: part of its shape."""

    def begin(
        self, ctx: TensorContext, inputs: Inputs, cache: KvCache, n_tokens: int, n_kv: int
    ) -> AttentionGraph:
        """Declares its inputs in a new graph."""

    def write(self, inputs: Inputs, cache: KvCache, batch: Batch, n_kv: int) -> None:
        """Writes its inputs for one step."""


def write_causal_mask(inputs: Inputs, batch: Batch, n_kv: int) -> None:
    """mask (n_tokens, n_kv): 0 where the row sees the cell, else -inf."""
    mask = inputs.view("mask", batch.n_tokens * n_kv).reshape(batch.n_tokens, n_kv)
    mask.fill(-np.inf)
    seen = batch.stretches
    if batch.n_tokens == 1 and len(seen.run_start) == 1:  # the Context's decode step, kept cheap
        start = seen.run_start[0]
        mask[0, start + seen.row_begin[0] : start + seen.row_end[0]] = 0
    else:
        np.copyto(mask, 0, where=mask_from(seen, batch.n_tokens, n_kv))
