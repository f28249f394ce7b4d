"""The routed lowering: two custom nodes a target read per row which adapters apply.

The mix is input data, so a graph serves any adapters of any ranks: nothing is rebuilt when they
change, and its number of nodes does not depend on what is registered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.ggml.handles import F32, Tensor, data_address
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.lowrank.base import (
    GraphLowering,
    NoLowering,
    RowSet,
    check_mixable,
    mix_of_rows,
)
from loragraph.graph.lowrank.resident import Resident
from loragraph.kernels.lowrank import ExpandNode, GatherNode, Group, LowrankStep, ShrinkNode
from loragraph.model.weights import Weight

_NODES_PER_WEIGHT = 3  # shrink, expand, and the view that the in-place expand is


class RoutedLowering:
    """Low-rank nodes for every weight; `n_slots` adapters can be resident at once."""

    name = "routed"

    def __init__(
        self, weights: Mapping[str, Weight], resident: Resident, n_batch: int, max_mix: int = 16
    ) -> None:
        self._weights = weights
        self._resident = resident
        self._max_mix = max_mix
        self._steps = {rows: LowrankStep(n_batch * max_mix, resident.n_slots, 0) for rows in RowSet}
        self._written: Hashable = None

    def graph_key(self, batch: Batch) -> Hashable:
        """Only whether some token carries an adapter."""
        return batch.adapted

    def extra_nodes(self) -> int:
        """A fixed number for each weight."""
        return _NODES_PER_WEIGHT * len(self._weights)

    def check(self, mix: Mix) -> None:
        """Raises for more adapters than a token can carry, and for experts (not routed yet)."""
        check_mixable(mix, self._max_mix, self._weights, self.name)

    def attach(self, mix: Mix) -> None:
        """Makes the adapters resident."""
        self._resident.hold(mix.adapters)

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """Makes exactly these adapters resident, for steps with any mixes of them."""
        self._resident.hold(adapters)

    def begin(self, batch: Batch) -> GraphLowering:
        """Nodes for every weight, or none for a batch of the base alone."""
        if not batch.adapted:
            return NoLowering()
        return _RoutedGraph(self._resident, self._steps)

    def write(self, batch: Batch) -> None:
        """Writes the row sets as groups of rows by adapter."""
        if not batch.adapted:
            return
        arrays = (batch.mix.tobytes(), batch.outputs.tobytes())
        written = (self._resident.n_changes, batch.mixes, batch.n_states, *arrays)
        if written == self._written:  # as in most decodes: the last step's rows again
            return
        self._written = None
        slots = self._resident.slots
        for rows, mix in mix_of_rows(batch).items():
            step = self._steps[rows]
            step.reserve(self._resident.floats_per_entry)
            step.write(group_rows(mix, batch.mixes, slots))
        self._written = written

    def close(self) -> None:
        """Lets the resident adapters go."""
        self._resident.close()


def group_rows(
    mix: NDArray[np.int32], mixes: Sequence[Mix], slots: Mapping[Adapter, int]
) -> list[Group]:
    """The rows of each adapter, groups in digest order: the canonical order of summation.

    `mix` (n_rows,) i32 names each row's entry of `mixes`.
    """
    entries: dict[str, list[tuple[NDArray[np.int64], float, int]]] = {}
    for index, one in enumerate(mixes):
        if not one:
            continue
        rows = np.flatnonzero(mix == index)
        if len(rows):
            for adapter, scale in one:
                entries.setdefault(adapter.digest, []).append((rows, scale, slots[adapter]))
    return [_group(entries[digest]) for digest in sorted(entries)]


def _group(parts: list[tuple[NDArray[np.int64], float, int]]) -> Group:
    if len(parts) == 1:
        rows, scale, slot = parts[0]
        return Group(slot, rows, np.full(len(rows), scale, np.float32))
    rows = np.concatenate([part[0] for part in parts])
    scales = np.concatenate([np.full(len(part[0]), part[1], np.float32) for part in parts])
    order = np.argsort(rows, kind="stable")
    return Group(parts[0][2], rows[order], scales[order])


class _RoutedGraph:
    """The custom nodes of one graph; keeps their structs alive as long as the graph."""

    def __init__(self, resident: Resident, steps: Mapping[RowSet, LowrankStep]) -> None:
        self._resident = resident
        self._steps = steps
        self._shrinks: list[tuple[ShrinkNode, Tensor]] = []
        self._gathers: list[tuple[GatherNode, Tensor]] = []
        self._expands: list[tuple[ExpandNode, Tensor]] = []
        self._last: tuple[Tensor, ShrinkNode, Tensor] | None = None

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        target = self._resident.targets[w.name]
        # Weights that read the same x share one shrink; only while no other shrink came between,
        # since the scratch that holds A x is one for all.
        if self._last is None or self._last[0] is not x:
            node = ShrinkNode(self._steps[rows], [])
            done = ops.custom(F32, (1,), [x], node.function, node.userdata)
            self._shrinks.append((node, x))
            self._last = (x, node, done)
        _, shrink, done = self._last
        return self._expand(ops, ExpandNode(shrink, shrink.add_target(target)), y, done)

    def experts(self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        """Adapters on experts are refused in `RoutedLowering.check`."""
        return y

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        node = GatherNode(self._steps[RowSet.TOKENS], self._resident.targets[w.name])
        done = ops.custom(F32, (1,), [ids], node.function, node.userdata)
        self._gathers.append((node, ids))
        self._last = None
        return self._expand(ops, ExpandNode(node), y, done)

    def bind(self) -> None:
        for shrink, x in self._shrinks:
            shrink.bind(data_address(x), x.ptr.nb[1] // 4)
        for gather, ids in self._gathers:
            gather.bind(data_address(ids))
        for expand, y in self._expands:
            expand.bind(data_address(y), y.ptr.nb[1] // 4)

    def _expand(self, ops: Ops, node: ExpandNode, y: Tensor, done: Tensor) -> Tensor:
        self._expands.append((node, y))
        return ops.custom_inplace(y, [done], node.function, node.userdata)
