"""The routed lowering: two custom nodes a target read per row which adapters apply.

The mix is input data, so a graph serves any adapters of any ranks: nothing is rebuilt when they
change, and its number of nodes does not depend on what is registered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.errors import BackendError
from loragraph.ggml.handles import F32, Tensor, data_address
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.lowrank.base import (
    MAX_MIX,
    GraphLowering,
    NoLowering,
    PlainNorms,
    RowSet,
    check_mixable,
    mix_of_rows,
)
from loragraph.graph.lowrank.resident import Resident
from loragraph.kernels.lowrank import (
    ExpandNode,
    ExpertStep,
    GatherNode,
    Group,
    LowrankStep,
    RouteNode,
    ShrinkNode,
)
from loragraph.model.weights import Weight

_NODES_PER_WEIGHT = 4  # route (experts), shrink, expand, and the view that the expand is


class RoutedLowering:
    """Low-rank nodes for every weight; `n_slots` adapters can be resident at once."""

    name = "routed"

    def __init__(
        self,
        weights: Mapping[str, Weight],
        resident: Resident,
        n_batch: int,
        max_mix: int = MAX_MIX,
    ) -> None:
        self._weights = weights
        self._resident = resident
        self._max_mix = max_mix
        self._steps = {rows: LowrankStep(n_batch * max_mix, resident.n_slots, 0) for rows in RowSet}
        self._experts: dict[_Routing, ExpertStep] = {}
        self._written: Hashable = None

    def graph_key(self, batch: Batch) -> Hashable:
        """Only whether some token carries an adapter."""
        return batch.adapted

    def extra_nodes(self) -> int:
        """A fixed number for each weight."""
        return _NODES_PER_WEIGHT * len(self._weights)

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
        """Nodes for every weight, or none for a batch of the base alone."""
        if not batch.adapted:
            return NoLowering()
        return _RoutedGraph(self._resident, self._steps, self._experts)

    def write(self, batch: Batch) -> None:
        """Writes the row sets as groups of rows by adapter."""
        if not batch.adapted:
            return
        self._write_steps(batch)
        for routing, step in self._experts.items():  # a graph may have brought new ones
            n_entries = self._steps[routing.rows].n_entries * routing.n_used
            step.fit(n_entries, self._resident.floats_per_entry)

    def _write_steps(self, batch: Batch) -> None:
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


class _Routing(NamedTuple):
    """What products with experts need a step of their own for."""

    rows: RowSet
    n_expert: int
    n_used: int


class _Route(NamedTuple):
    """The experts of which the routed step tells, after its node."""

    ids: Tensor
    step: ExpertStep
    done: Tensor


class _Shrink(NamedTuple):
    """What scratch holds A x of, after its node."""

    x: Tensor
    ids: Tensor | None  # None: plain weights
    node: ShrinkNode
    done: Tensor


class _RoutedGraph(PlainNorms):
    """The custom nodes of one graph; keeps their structs alive as long as the graph."""

    def __init__(
        self,
        resident: Resident,
        steps: Mapping[RowSet, LowrankStep],
        experts: dict[_Routing, ExpertStep],
    ) -> None:
        self._resident = resident
        self._steps = steps
        self._experts = experts  # of all graphs: one runs at a time
        self._shrinks: list[tuple[ShrinkNode, Tensor]] = []
        self._gathers: list[tuple[GatherNode, Tensor]] = []
        self._expands: list[tuple[ExpandNode, Tensor]] = []
        self._routes: list[tuple[RouteNode, Tensor]] = []
        self._last: _Shrink | None = None
        self._route: _Route | None = None

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        target = self._resident.targets[w.name]
        # Weights that read the same x share one shrink; only while no other shrink came between,
        # since the scratch that holds A x is one for all.
        last = self._last
        if last is None or last.x is not x or last.ids is not None:
            node = ShrinkNode(self._steps[rows])
            last = self._shrink(ops, node, x, None, [])
        return self._expand(ops, ExpandNode(last.node, last.node.add_target(target)), y, last.done)

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        target = self._resident.targets[w.name]
        n_used, n_x = ids.ne[0], x.ne[1]
        if n_x not in (1, n_used):
            raise BackendError(f"expected 1 or {n_used} rows a token, got {x}")
        last = self._last
        if last is None or last.x is not x or last.ids is not ids:
            route = self._routed(ops, _Routing(rows, w.ne[2], n_used), ids)
            node = ShrinkNode(route.step, x_by_token=n_x == 1)
            last = self._shrink(ops, node, x, ids, [route.done])
        return self._expand(ops, ExpandNode(last.node, last.node.add_target(target)), y, last.done)

    def _routed(self, ops: Ops, routing: _Routing, ids: Tensor) -> _Route:
        """The route node of `ids`: shared until other ids need the same memory."""
        if self._route is None or self._route.ids is not ids:
            step = self._experts.setdefault(routing, ExpertStep(routing.n_expert))
            node = RouteNode(self._steps[routing.rows].struct, step, routing.n_used)
            done = ops.custom(F32, (1,), [ids], node.function, node.userdata)
            self._routes.append((node, ids))
            self._route = _Route(ids, step, done)
        return self._route

    def _shrink(
        self, ops: Ops, node: ShrinkNode, x: Tensor, ids: Tensor | None, after: list[Tensor]
    ) -> _Shrink:
        read = x
        if not node.x_by_token and x.ne[2] > 1 and x.ptr.nb[2] != x.ne[1] * x.ptr.nb[1]:
            read = ops.cont(x)  # the kernel knows one distance between rows
        done = ops.custom(F32, (1,), [read, *after], node.function, node.userdata)
        self._shrinks.append((node, read))
        self._last = _Shrink(x, ids, node, done)
        return self._last

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        node = GatherNode(self._steps[RowSet.TOKENS], self._resident.targets[w.name])
        done = ops.custom(F32, (1,), [ids], node.function, node.userdata)
        self._gathers.append((node, ids))
        self._last = None
        return self._expand(ops, ExpandNode(node), y, done)

    def bind(self) -> None:
        for route, ids in self._routes:
            route.bind(data_address(ids), ids.ptr.nb[1] // 4)
        for shrink, x in self._shrinks:
            shrink.bind(data_address(x), x.ptr.nb[2 if shrink.x_by_token else 1] // 4)
        for gather, ids in self._gathers:
            gather.bind(data_address(ids))
        for expand, y in self._expands:
            expand.bind(data_address(y), y.ptr.nb[1] // 4)

    def _expand(self, ops: Ops, node: ExpandNode, y: Tensor, done: Tensor) -> Tensor:
        self._expands.append((node, y))
        return ops.custom_inplace(y, [done], node.function, node.userdata)
