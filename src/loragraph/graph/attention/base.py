"""The contract of an attention, and what the two masked ones share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.handles import Tensor, TensorContext
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.kv_cache import KvCache
from loragraph.graph.stretches import Stretches, mask_from

CELL_QUANTUM = 256
"""The number of cells a graph walks is a multiple of this, so that it stays valid for a while."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a layer attends: softmax(softcap(scale q k)) v over the positions of its window."""

    scale: float
    window: int = 0  # newest positions seen, the token's own included; 0: all
    softcap: float = 0.0  # c tanh(s / c); 0: none
    sinks: Tensor | None = None  # F32 [n_head]: a score of each head that no position has


def masked_n_kv(batch: Batch, n_cells: int) -> int:
    """Cells that a masked graph walks: up to the last one seen, in whole quanta of `n_cells`."""
    n_used = batch.stretches.end_cell
    return min(n_cells, max(CELL_QUANTUM, -(-n_used // CELL_QUANTUM) * CELL_QUANTUM))


class AttentionGraph(Protocol):
    """Attention in one graph: inputs are declared once, then one call a layer."""

    def layer(
        self, ops: Ops, il: int, q: Tensor, k: Tensor, v: Tensor, form: Form
    ) -> tuple[Tensor, list[Tensor]]:
        """q, k, v F32 [hd, n_head(_kv), n_tokens] -> F32 [hd * n_head, n_tokens].

        They may be views whose tokens are apart, as those of a fused projection are. Where cells
        hold no V, v is the first values of k, and read as such.

        Also the nodes that write K and V where nothing refers to them: the graph must take them in
        first, by hand.
        """

    def bind(self) -> None:
        """Tells custom nodes the addresses that the graph's tensors have got."""


class Attention(Protocol):
    """A way to attend: what inputs it needs, its part of a graph, its part of a step.

    It is made for the windows of a model's layers, and has an input of its own for each.
    """

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


def seen_through(batch: Batch, windows: Collection[int]) -> Iterator[tuple[int, Stretches]]:
    """What each row sees of its sequence, by window."""
    for window in windows:
        yield (
            window,
            batch.stretches.windowed(batch.positions, window) if window else batch.stretches,
        )


def mask_name(window: int) -> str:
    """The input that holds the mask of layers with this window."""
    return f"mask_{window}" if window else "mask"


def mask_specs(
    type_: int, windows: Collection[int], n_batch: int, n_cells: int
) -> Mapping[str, InputSpec]:
    """Masks [n_kv, n_tokens]."""
    return {mask_name(window): InputSpec(type_, n_batch * n_cells) for window in windows}


def write_masks(inputs: Inputs, batch: Batch, windows: Collection[int], n_kv: int) -> None:
    """masks (n_tokens, n_kv): 0 where the row sees the cell, else -inf."""
    for window, seen in seen_through(batch, windows):
        mask = inputs.view(mask_name(window), batch.n_tokens * n_kv)
        _write_mask(mask.reshape(batch.n_tokens, n_kv), batch, seen)


def _write_mask(mask: NDArray[np.floating[Any]], batch: Batch, seen: Stretches) -> None:
    mask.fill(-np.inf)
    if batch.n_tokens == 1 and len(seen.run_start) == 1:  # the Context's decode step, kept cheap
        start = seen.run_start[0]
        mask[0, start + seen.row_begin[0] : start + seen.row_end[0]] = 0
    else:
        np.copyto(mask, 0, where=mask_from(seen, *mask.shape))
