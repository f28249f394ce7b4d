"""Vectors of adapters (DoRA's gains, biases, norms) around any lowering, with ggml's operations.

Semantics: y += (G S) * y + C S before the low-rank part, and w + D S in place of a norm's weight w,
where G, C and D [n_slots, n_out] hold the gains, shifts and norms' changes of the resident adapters
and S [n_slots, n] each token's user scales. Which adapters a token carries is input data, so
batches may mix them; a step without such an adapter has no such node. A slot keeps an adapter by
its digest: what is in it is a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.errors import BackendError
from loragraph.ggml.handles import F32, Buffer, Tensor, TensorContext, array_view
from loragraph.ggml.lib import Library
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.inputs import Inputs, InputSpec
from loragraph.graph.lowrank.base import GraphLowering, Lowering, RowSet, mix_of_rows
from loragraph.model.weights import Use, Weight

_MIN_SLOTS = 4
_NODES_PER_TARGET = 5  # G S, its product with y, the sum; C S, the sum; or D S, the sum, a view
_KINDS = ("gain", "shift", "delta")  # of vectors, as RowVectors calls them


@dataclass(frozen=True, slots=True)
class _Table:
    """The vectors of one target by slot, of the kinds of which some adapter has any."""

    tensors: Mapping[str, Tensor]  # by kind, F32 [n_slots, n_out]
    values: Mapping[str, NDArray[np.float32]]  # by kind, (n_out, n_slots) f32


class VectorLowering:
    """Another lowering with the row vectors of adapters before its low-rank part."""

    def __init__(
        self,
        inner: Lowering,
        lib: Library,
        weights: Mapping[str, Weight],
        n_batch: int,
        max_slots: int = 64,
    ) -> None:
        """Takes `inner` over: closing closes both."""
        self.inner = inner
        self.name = inner.name
        self._lib = lib
        self._weights = weights
        self._n_batch = n_batch
        self._max_slots = max_slots
        self._slots: dict[str, int] = {}  # digest -> slot
        self._n_slots = 0  # never falls, so tables settle at what is wanted at once
        self._tables: dict[str, _Table] = {}
        self._memory: tuple[TensorContext, Buffer] | None = None
        self._inputs: Inputs | None = None
        self._generation = 0

    def graph_key(self, batch: Batch) -> Hashable:
        """The inner key, and which tables the graph reads; places the batch's adapters."""
        key = self.inner.graph_key(batch)
        wanted = _with_vectors(batch)
        if not wanted:
            return key
        self._hold(wanted)
        return (key, self._generation)

    def extra_nodes(self) -> int:
        """Those of the inner lowering, and a fixed number for each target with vectors."""
        return self.inner.extra_nodes() + _NODES_PER_TARGET * len(self._tables)

    def begin(self, batch: Batch) -> GraphLowering:
        """The inner nodes, behind those of the vectors where some token needs them."""
        inner = self.inner.begin(batch)
        if not _with_vectors(batch):
            return inner
        assert self._inputs is not None  # graph_key came before
        return _VectorGraph(inner, self._tables, self._inputs, self._n_slots)

    def check(self, mix: Mix) -> None:
        """What the inner lowering refuses."""
        self.inner.check(mix)

    def attach(self, mix: Mix) -> None:
        """The inner lowering's; vectors are placed when a step needs them."""
        self.inner.attach(mix)

    def write(self, batch: Batch) -> None:
        """Each token's user scales by slot, for both row sets."""
        self.inner.write(batch)
        if self._inputs is None or not _with_vectors(batch):
            return
        scales = np.zeros((len(batch.mixes), self._n_slots), np.float32)
        for index in set(batch.mix.tolist()):
            for adapter, scale in batch.mixes[index]:
                if adapter.vectors:
                    scales[index, self._slots[adapter.digest]] = scale
        for rows, mix in mix_of_rows(batch).items():
            view = self._inputs.view(_scales_name(rows), len(mix) * self._n_slots)
            view.reshape(-1, self._n_slots)[:] = scales[mix]

    def close(self) -> None:
        """Frees the tables and closes the inner lowering."""
        self._free()
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None
        self.inner.close()

    def _hold(self, adapters: Mapping[str, Adapter]) -> None:
        """Makes sure that these are in a slot, with tables for all that they change."""
        new = {digest: one for digest, one in adapters.items() if digest not in self._slots}
        if not new:
            return
        if len(adapters) > self._max_slots:
            raise BackendError(
                f"expected at most {self._max_slots} adapters with row vectors in a step, got "
                f"{len(adapters)}"
            )
        present = {(name, kind) for name, table in self._tables.items() for kind in table.tensors}
        wanted = present | _tables_of(new.values())
        if len(adapters) > self._n_slots or wanted != present:
            self._rebuild(adapters, wanted)
            return
        gone = [digest for digest in self._slots if digest not in adapters]
        for digest in gone[: len(self._slots) + len(new) - self._n_slots]:  # the oldest first
            del self._slots[digest]
        free = sorted(set(range(self._n_slots)) - set(self._slots.values()))
        for (digest, adapter), slot in zip(new.items(), free, strict=False):
            self._write_slot(slot, adapter)
            self._slots[digest] = slot

    def _rebuild(self, adapters: Mapping[str, Adapter], wanted: set[tuple[str, str]]) -> None:
        """Wider tables, with these adapters; graphs of the old ones are not run again."""
        n_slots = max(_MIN_SLOTS, self._n_slots)
        while n_slots < len(adapters):
            n_slots *= 2
        self._free()
        ctx = TensorContext(self._lib, len(wanted))
        made: dict[str, dict[str, Tensor]] = {}
        try:
            for name, kind in sorted(wanted):
                tensor = ctx.new_tensor(F32, (n_slots, self._n_rows(name)))
                made.setdefault(name, {})[kind] = tensor
            buffer = Buffer.for_tensors(ctx)
        except BaseException:
            ctx.close()
            raise
        self._lib.c.ggml_backend_buffer_clear(buffer.ptr, 0)
        self._memory = (ctx, buffer)
        self._n_slots = n_slots
        self._tables = {
            name: _Table(tensors, {kind: self._values(tensor) for kind, tensor in tensors.items()})
            for name, tensors in made.items()
        }
        self._make_inputs(n_slots)
        for slot, (digest, adapter) in enumerate(adapters.items()):
            self._write_slot(slot, adapter)
            self._slots[digest] = slot
        self._generation += 1

    def _make_inputs(self, n_slots: int) -> None:
        if self._inputs is not None:
            self._inputs.close()
        n_values = self._n_batch * n_slots
        self._inputs = Inputs(
            self._lib, {_scales_name(rows): InputSpec(F32, n_values) for rows in RowSet}
        )

    def _values(self, tensor: Tensor) -> NDArray[np.float32]:
        values: NDArray[np.float32] = array_view(self._lib, tensor)
        return values.reshape(tensor.ne[1], tensor.ne[0])

    def _write_slot(self, slot: int, adapter: Adapter) -> None:
        for name, table in self._tables.items():
            vectors = adapter.vectors.get(name)
            for kind, values in table.values.items():
                part = None if vectors is None else getattr(vectors, kind)
                values[:, slot] = 0 if part is None else part

    def _n_rows(self, name: str) -> int:
        weight = self._weights[name]
        return weight.ne[0] if weight.use in (Use.LOOKUP, Use.VECTOR) else weight.ne[1]

    def _free(self) -> None:
        memory, self._memory = self._memory, None
        self._slots = {}
        self._tables = {}
        if memory is not None:
            ctx, buffer = memory
            buffer.close()
            ctx.close()


class _VectorGraph:
    """The nodes of one graph."""

    def __init__(
        self, inner: GraphLowering, tables: Mapping[str, _Table], inputs: Inputs, n_slots: int
    ) -> None:
        self._inner = inner
        self._tables = tables
        self._inputs = inputs
        self._n_slots = n_slots
        self._scales: dict[RowSet, Tensor] = {}

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        return self._inner.linear(ops, w, x, self._apply(ops, w, y, rows), rows)

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        return self._inner.experts(ops, w, x, ids, y, rows)  # no vectors: the checks say so

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        return self._inner.lookup(ops, w, ids, self._apply(ops, w, y, RowSet.TOKENS))

    def norm_weight(self, ops: Ops, w: Weight, rows: RowSet, n: int) -> Tensor | None:
        table = self._tables.get(w.name)
        if table is None or "delta" not in table.tensors:
            return None
        changes = ops.mul_mat(table.tensors["delta"], self._scales_of(ops, rows, n))
        return ops.add(changes, w.tensor)  # exactly w where every scale is 0

    def bind(self) -> None:
        self._inner.bind()

    def _apply(self, ops: Ops, w: Weight, y: Tensor, rows: RowSet) -> Tensor:
        """y F32 [n_out, n] with gains and shifts of each token's adapters."""
        table = self._tables.get(w.name)
        if table is None:
            return y
        scales = self._scales_of(ops, rows, y.ne[1])
        if "gain" in table.tensors:
            y = ops.add(y, ops.mul(y, ops.mul_mat(table.tensors["gain"], scales)))
        if "shift" in table.tensors:
            y = ops.add(y, ops.mul_mat(table.tensors["shift"], scales))
        return y

    def _scales_of(self, ops: Ops, rows: RowSet, n: int) -> Tensor:
        if rows not in self._scales:
            self._scales[rows] = self._inputs.tensor(ops.ctx, _scales_name(rows), self._n_slots, n)
        return self._scales[rows]


def _with_vectors(batch: Batch) -> dict[str, Adapter]:
    """The adapters with row vectors that some token carries, by digest."""
    if not any(adapter.vectors for mix in batch.mixes for adapter in mix.adapters):
        return {}  # as for nearly all batches: the rows need not be looked at
    return {
        adapter.digest: adapter
        for index in set(batch.mix.tolist())
        for adapter in batch.mixes[index].adapters
        if adapter.vectors
    }


def _tables_of(adapters: Iterable[Adapter]) -> set[tuple[str, str]]:
    """(target, kind) of every vector that some adapter has."""
    return {
        (name, kind)
        for adapter in adapters
        for name, vectors in adapter.vectors.items()
        for kind in _KINDS
        if getattr(vectors, kind) is not None
    }


def _scales_name(rows: RowSet) -> str:
    return f"vector_scales_{rows.value}"
