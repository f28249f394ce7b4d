"""What the lowerings of y = W x + sum_i s_i B_i A_i x have in common."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.mix import Mix
from loragraph.errors import MixTooLargeError
from loragraph.ggml.handles import Tensor
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.model.weights import Weight

NODES_PER_PAIR_BUDGET = 6
"""Nodes that llama.cpp reserves for one pair of a registered adapter; the branch uses four."""


MAX_MIX = 16
"""Adapters that a token carries at most: step inputs have room for so many of every token."""


class RowSet(Enum):
    """Which rows an activation holds: all tokens, the outputs, or those of them with logits."""

    TOKENS = "tokens"
    OUTPUTS = "outputs"
    LOGITS = "logits"  # in steps where other outputs give their state


def mix_of_rows(batch: Batch) -> dict[RowSet, NDArray[np.int32]]:
    """The mix (n_rows,) i32 of each row of the row sets that the batch's graph uses."""
    found = {RowSet.TOKENS: batch.mix, RowSet.OUTPUTS: batch.mix[batch.outputs]}
    if batch.n_states:
        found[RowSet.LOGITS] = found[RowSet.OUTPUTS][: batch.n_logits]
    return found


class GraphLowering(Protocol):
    """The low-rank part of one graph, called from the builder's three seams."""

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        """y F32 [n_out, n] = W x; gives y plus the low-rank part."""

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        """The same for products with the experts `ids` I32 [n_used, n].

        x F32 [n_in, 1 or n_used, n] · y F32 [n_out, n_used, n]; A and B are those of the expert.
        """

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        """The same for rows `ids` I32 [n] of the token table."""

    def norm_weight(self, ops: Ops, w: Weight, rows: RowSet, n: int) -> Tensor | None:
        """The weight of a norm for each of the `n` rows, F32 [w.ne[0], n]; None: w for all."""

    def bind(self) -> None:
        """Called once the graph has memory: addresses of its tensors are final."""


class Lowering(Protocol):
    """One way to compute the low-rank part, for all graphs of a context."""

    name: str

    def graph_key(self, batch: Batch) -> Hashable:
        """What of the adapters decides a graph's structure; False: no low-rank nodes at all."""

    def extra_nodes(self) -> int:
        """Nodes that a graph may need beyond the base's."""

    def begin(self, batch: Batch) -> GraphLowering:
        """The low-rank part of a new graph with this batch's key."""

    def check(self, mix: Mix) -> None:
        """Raises UnsupportedError for a mix that this lowering cannot compute."""

    def attach(self, mix: Mix) -> None:
        """Makes the mix's adapters ready, before a step that uses them."""

    def write(self, batch: Batch) -> None:
        """Writes the step's inputs."""

    def close(self) -> None:
        """Frees its memory."""


class PlainNorms:
    """Norms whose weights no adapter changes: what changes them stands around a lowering."""

    def norm_weight(self, ops: Ops, w: Weight, rows: RowSet, n: int) -> Tensor | None:
        """None: the weight itself."""
        return None


class NoLowering(PlainNorms):
    """The base alone: no low-rank nodes."""

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        """y itself."""
        return y

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        """y itself."""
        return y

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        """y itself."""
        return y

    def bind(self) -> None:
        """Nothing to bind."""


def check_mixable(mix: Mix, max_mix: int) -> None:
    """What `routed` and `stacked` refuse: MixTooLargeError for more than `max_mix` adapters."""
    if len(mix) > max_mix:
        raise MixTooLargeError(
            f"expected at most {max_mix} adapters a token, got {len(mix)}",
            hint="combine some of them into one adapter",
        )
