"""The stacked lowering: ggml's own nodes read per token which slots of stacked adapters apply.

Two products a target, mul_mat_id over A and over B, with slot ids and scales of each token as
input data: for backends on which a custom node cannot run. A token has `width` places for
adapters, the widest mix of the step rounded up to a power of two; unused places name slot 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.ggml.handles import F32, I32, Tensor
from loragraph.ggml.lib import Library
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.lowrank.base import (
    MAX_MIX,
    GraphLowering,
    NoLowering,
    PlainNorms,
    RowSet,
    check_mixable,
    mix_of_rows,
)
from loragraph.graph.lowrank.stacks import StackedSlots, Stacks
from loragraph.model.weights import Use, Weight

_NODES_PER_WEIGHT = 5  # x as [n_in, 1, n], A x, times scales, B of it, y as one matrix
_NODES_PER_PLACE = 2  # a place's view and its add
_NODES_PER_EXPERT_PLACE = 8  # experts of a slot (view, rows, shape), A x, scale (view, product), B
_TABLE_ROWS = "stacked_table_rows"


class StackedLowering:
    """Products with stacked adapters; `n_slots` of them can be resident at once."""

    name = "stacked"

    def __init__(
        self,
        lib: Library,
        weights: Mapping[str, Weight],
        n_batch: int,
        *,
        tied: bool,
        n_slots: int = 64,
        max_mix: int = MAX_MIX,
    ) -> None:
        self._weights = weights
        self._max_mix = max_mix
        self._max_width = 1 << (max_mix - 1).bit_length()
        self._resident = StackedSlots(lib, weights, tied=tied, n_slots=n_slots)
        self._generation = 0
        n_values = n_batch * self._max_width
        specs = {_TABLE_ROWS: InputSpec(I32, n_values)}
        self._n_experts = {w.ne[2] for w in weights.values() if w.use is Use.EXPERTS}
        for rows in RowSet:
            specs[_ids_name(rows)] = InputSpec(I32, n_values)
            specs[_scales_name(rows)] = InputSpec(F32, n_values)
            for n_expert in self._n_experts:
                specs[_experts_name(rows, n_expert)] = InputSpec(I32, n_values * n_expert)
        try:
            self._inputs = Inputs(lib, specs)
        except BaseException:
            self._resident.close()
            raise

    @property
    def n_rebuilds(self) -> int:
        """How often the stacks had to widen."""
        return self._resident.n_rebuilds

    @property
    def nbytes(self) -> int:
        """Bytes of the stacks."""
        return self._resident.stacks.nbytes

    def graph_key(self, batch: Batch) -> Hashable:
        """Places a token and the stacks that a graph reads; their content is no part of it."""
        return (self._width(batch), self.n_rebuilds) if batch.adapted else False

    def extra_nodes(self) -> int:
        """A fixed number for each weight, enough for the widest mix."""
        n_experts = sum(w.use is Use.EXPERTS for w in self._weights.values())
        n_places = self._max_width * _NODES_PER_PLACE * len(self._weights)
        n_expert_places = self._max_width * _NODES_PER_EXPERT_PLACE * n_experts
        return _NODES_PER_WEIGHT * len(self._weights) + n_places + n_expert_places

    def check(self, mix: Mix) -> None:
        """Raises for more adapters than a token can carry."""
        check_mixable(mix, self._max_mix)

    def attach(self, mix: Mix) -> None:
        """Makes the adapters resident."""
        self._resident.hold(mix.adapters)

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """Makes exactly these adapters resident, for steps with any mixes of them."""
        self._resident.hold(adapters)

    def begin(self, batch: Batch) -> GraphLowering:
        """Nodes for every target that some adapter had, or none for a batch of the base alone."""
        if not batch.adapted:
            return NoLowering()
        return _StackedGraph(self._resident.stacks, self._inputs, self._width(batch))

    def write(self, batch: Batch) -> None:
        """Writes slots and scales of each row of the row sets."""
        if not batch.adapted:
            return
        width = self._width(batch)
        slots, scales = self._places(batch, width)
        for rows, mix in mix_of_rows(batch).items():
            n = len(mix) * width
            self._inputs.view(_ids_name(rows), n).reshape(-1, width)[:] = slots[mix]
            self._inputs.view(_scales_name(rows), n).reshape(-1, width)[:] = scales[mix]
            for n_expert in self._n_experts:
                table = self._inputs.view(_experts_name(rows, n_expert), n * n_expert)
                table.reshape(width, -1, n_expert)[:] = _matrices(slots[mix].T, n_expert)
        table_rows = self._inputs.view(_TABLE_ROWS, batch.n_tokens * width).reshape(-1, width)
        table_rows[:] = self._table_rows(slots[batch.mix], batch.tokens)

    def close(self) -> None:
        """Frees the stacks and the inputs."""
        self._resident.close()
        self._inputs.close()

    def _width(self, batch: Batch) -> int:
        """Places a token, a power of two."""
        widest = max(len(batch.mixes[i]) for i in set(batch.mix.tolist()))
        return 1 << (widest - 1).bit_length()

    def _places(self, batch: Batch, width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Slots and scales (n_mixes, width) of the mixes that some token carries."""
        slots = np.zeros((len(batch.mixes), width), np.int32)
        scales = np.zeros((len(batch.mixes), width), np.float32)
        for index in set(batch.mix.tolist()):
            for place, (adapter, scale) in enumerate(batch.mixes[index]):
                slots[index, place] = self._resident.slots[adapter]
                scales[index, place] = scale
        return slots, scales

    def _table_rows(self, slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows of the token table's A (n_tokens, width), 0 (zeros) where a slot has no pair."""
        places = np.full(self._resident.stacks.n_slots, -1, np.int64)
        for slot, place in self._resident.tables.items():
            places[slot] = place
        chosen = places[slots]
        n_vocab = next((w.ne[1] for w in self._weights.values() if w.use is Use.LOOKUP), 0)
        return np.where(chosen < 0, 0, 1 + chosen * n_vocab + tokens[:, None])


class _Rows(NamedTuple):
    """One row set's inputs."""

    ids: Tensor  # I32 [width, n]
    scales: Tensor  # F32 [1, width, n]


class _StackedGraph(PlainNorms):
    """The nodes of one graph."""

    def __init__(self, stacks: Stacks, inputs: Inputs, width: int) -> None:
        self._targets = stacks.targets
        self._inputs = inputs
        self._width = width
        self._rows: dict[RowSet, _Rows] = {}
        self._tables: dict[str, Tensor] = {}  # I32 [n_expert, n * width]
        self._chosen: tuple[Tensor, int, list[Tensor]] | None = None

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        stack = self._targets.get(w.name)
        if stack is None:
            return y
        n_in, n = x.ne[:2]
        inputs = self._rows_of(ops, rows, n)
        h = ops.mul_mat_id(stack.a, ops.reshape(x, n_in, 1, n), inputs.ids)
        return self._add_delta(ops, stack.b, h, inputs, y)

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        stack = self._targets.get(w.name)
        if stack is None:
            return y
        n = ids.ne[1]
        scales = self._rows_of(ops, rows, n).scales
        for place, matrices in enumerate(self._matrices_of(ops, rows, stack.n_expert, ids)):
            scale = ops.view(scales, (1, 1, n), (4, 4 * self._width), 4 * place)
            h = ops.mul(ops.mul_mat_id(stack.a, x, matrices), scale)
            y = ops.add(y, ops.mul_mat_id(stack.b, h, matrices))
        return y

    def _matrices_of(self, ops: Ops, rows: RowSet, n_expert: int, ids: Tensor) -> list[Tensor]:
        """For each place of a token the stacks' matrices of its experts, I32 [n_used, n].

        Which adapter is input, which experts is known to the graph alone, and ggml adds no
        integers: so the input holds the matrix of every expert, and the experts choose.
        """
        if self._chosen is None or self._chosen[0] is not ids or self._chosen[1] != n_expert:
            n_used, n = ids.ne[:2]
            name = _experts_name(rows, n_expert)
            table = self._tables.get(name)
            if table is None:
                table = self._inputs.tensor(ops.ctx, name, n_expert, n * self._width)
                self._tables[name] = table
            chosen = []
            for place in range(self._width):
                of_place = ops.view(
                    table, (1, n_expert, n), (4, 4 * n_expert), 4 * n_expert * n * place
                )
                chosen.append(ops.reshape(ops.get_rows(of_place, ids), n_used, n))
            self._chosen = (ids, n_expert, chosen)
        return self._chosen[2]

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        stack = self._targets.get(w.name)
        if stack is None:
            return y
        n = ids.ne[0]
        table_rows = self._inputs.tensor(ops.ctx, _TABLE_ROWS, self._width * n)
        h = ops.reshape(ops.get_rows(stack.a, table_rows), stack.a.ne[0], self._width, n)
        return self._add_delta(ops, stack.b, h, self._rows_of(ops, RowSet.TOKENS, n), y)

    def bind(self) -> None:
        """ggml's own nodes need no addresses."""

    def _add_delta(self, ops: Ops, b: Tensor, h: Tensor, rows: _Rows, y: Tensor) -> Tensor:
        """y F32 [n_out, n] + the sum over a token's places of B (scale h), h [rank, width, n].

        The places are summed in a mix's canonical order.
        """
        delta = ops.mul_mat_id(b, ops.mul(h, rows.scales), rows.ids)
        n_out, n = y.ne[:2]
        if self._width == 1:
            return ops.add(y, ops.reshape(delta, n_out, n))
        row_bytes = 4 * n_out
        for place in range(self._width):
            one = ops.view(delta, (n_out, n), (self._width * row_bytes,), place * row_bytes)
            y = ops.add(y, one)
        return y

    def _rows_of(self, ops: Ops, rows: RowSet, n: int) -> _Rows:
        if rows not in self._rows:
            ids = self._inputs.tensor(ops.ctx, _ids_name(rows), self._width, n)
            scales = self._inputs.tensor(ops.ctx, _scales_name(rows), 1, self._width, n)
            self._rows[rows] = _Rows(ids, scales)
        return self._rows[rows]


def _ids_name(rows: RowSet) -> str:
    return f"stacked_ids_{rows.value}"


def _scales_name(rows: RowSet) -> str:
    return f"stacked_scales_{rows.value}"


def _experts_name(rows: RowSet, n_expert: int) -> str:
    return f"stacked_experts_{n_expert}_{rows.value}"


def _matrices(slots: NDArray[np.int32], n_expert: int) -> NDArray[np.int64]:
    """The matrix of every expert of each slot, slots' shape and an axis of n_expert; 0 = zeros."""
    first = np.where(slots > 0, 1 + (slots - 1) * n_expert, 0)[..., None]
    return np.where(first > 0, first + np.arange(n_expert), 0)
