"""Resident adapters as stacked tensors: one A and one B a target, a slot an adapter, slot 0 zeros.

A rank smaller than the widest of its target is padded with zeros. The stacks are rebuilt when they
must widen (a rank, a target, a type, more slots), never because adapters come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.values import dequantised
from loragraph.errors import CapacityError
from loragraph.ggml.handles import F16, F32, Buffer, Tensor, TensorContext, array_view
from loragraph.ggml.lib import Library
from loragraph.graph.lowrank.targets import TargetPair, target_pairs
from loragraph.model.weights import Use, Weight

_RANK_QUANTUM = 8
_MAX_ROWS = (1 << 31) - 1  # get_rows takes I32

Pairs = Mapping[str, TargetPair]


@dataclass(frozen=True, slots=True)
class StackShape:
    """How wide one target's stacks are."""

    max_rank: int
    type_a: int  # F16 where every lora_a is, else F32
    n_tables: int = 0  # the token table: adapters that have a pair there

    def widened(self, other: StackShape) -> StackShape:
        """The narrowest shape that holds both."""
        type_a = F16 if self.type_a == other.type_a == F16 else F32
        n_tables = max(self.n_tables, other.n_tables)
        return StackShape(max(self.max_rank, other.max_rank), type_a, n_tables)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stacked factors of one target and their memory.

    A [n_in, max_rank, n_slots] · B F32 [max_rank, n_out, n_slots], effective scales in B: A x,
    times a scale a token, would lose bits or overflow if B's type rounded it to F16. The token
    table's A is [max_rank, 1 + n_tables · n_vocab]: a row of zeros, then the adapters' tables.
    Experts: one matrix of zeros, then n_expert matrices for each slot but slot 0.
    """

    a: Tensor
    b: Tensor
    a_values: NDArray[np.float16 | np.float32]  # (n_matrices, max_rank, n_in), or table's rows
    b_values: NDArray[np.float32]  # (n_matrices, n_out, max_rank) f32
    n_expert: int  # 1: a matrix a slot

    def matrices(self, slot: int) -> slice:
        """The matrices of a slot other than 0."""
        return expert_matrices(slot, self.n_expert)


def expert_matrices(slot: int, n_expert: int) -> slice:
    """Where a stack holds the experts of `slot`, which is not slot 0: that is one of zeros."""
    return slice(1 + (slot - 1) * n_expert, 1 + slot * n_expert)


class Stacks:
    """The tensors of one layout; `shapes` and `n_slots` (with slot 0) never change."""

    def __init__(
        self,
        lib: Library,
        weights: Mapping[str, Weight],
        shapes: Mapping[str, StackShape],
        n_slots: int,
    ) -> None:
        self.shapes = dict(shapes)
        self.n_slots = n_slots
        self.targets: dict[str, Stack] = {}
        self._ctx = TensorContext(lib, max(1, 2 * len(shapes)))
        self._buffer: Buffer | None = None
        try:
            tensors = {name: self._tensors(weights[name], shape) for name, shape in shapes.items()}
            if tensors:
                self._buffer = Buffer.for_tensors(self._ctx)
                lib.c.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        except BaseException:
            self.close()
            raise
        for name, (a, b) in tensors.items():
            n0, n1, n2, _ = a.ne
            a_shape = (n1, n0) if weights[name].use is Use.LOOKUP else (n2, n1, n0)
            a_values = array_view(lib, a).reshape(a_shape)
            b_values = array_view(lib, b).reshape(b.ne[2], b.ne[1], b.ne[0])
            self.targets[name] = Stack(a, b, a_values, b_values, weights[name].ne[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def write(self, slot: int, pairs: Pairs, table: int) -> None:
        """Fills a slot; `table` is its place in the token table's A, if it has a pair there."""
        for name, stack in self.targets.items():
            linear = stack.a_values.ndim == 3
            pair = pairs.get(name)
            matrices = stack.matrices(slot)
            stack.b_values[matrices] = 0
            if linear:
                stack.a_values[matrices] = 0
            if pair is None:
                continue
            b = dequantised(pair.b.type, pair.b.data, pair.b.ne)
            b = b.reshape(-1, pair.b.ne[1], pair.rank)
            stack.b_values[matrices, :, : pair.rank] = b * np.float32(pair.scale)
            a: NDArray[np.float16 | np.float32]
            if stack.a.type == F16:
                a = pair.a.data.view(np.float16)
            else:
                a = dequantised(pair.a.type, pair.a.data, pair.a.ne)
            if linear:
                a = a.reshape(-1, pair.rank, pair.a.ne[0])
                stack.a_values[matrices, : pair.rank] = a
            else:
                a = a.reshape(-1, pair.rank)
                n_vocab = len(a)
                rows = stack.a_values[1 + table * n_vocab :][:n_vocab]
                rows[:, : pair.rank] = a
                rows[:, pair.rank :] = 0

    def close(self) -> None:
        """Frees the memory; graphs that read it must not be computed any more."""
        self.targets.clear()
        if self._buffer is not None:
            self._buffer.close()
        self._ctx.close()

    def _tensors(self, weight: Weight, shape: StackShape) -> tuple[Tensor, Tensor]:
        n_in, n_out = weight.ne[0], weight.ne[1]
        rank = shape.max_rank
        if weight.use is Use.LOOKUP:  # W [n_embd, n_vocab]
            n_rows = 1 + shape.n_tables * n_out
            if n_rows > _MAX_ROWS:
                raise CapacityError(
                    f"expected at most {_MAX_ROWS} stacked rows of {weight.name}, got {n_rows}",
                    hint="fewer adapters with a pair of the token table at once",
                )
            a = self._ctx.new_tensor(shape.type_a, (rank, n_rows))
            return a, self._ctx.new_tensor(F32, (rank, n_in, self.n_slots))
        n_matrices = expert_matrices(self.n_slots, weight.ne[2]).start
        a = self._ctx.new_tensor(shape.type_a, (n_in, rank, n_matrices))
        return a, self._ctx.new_tensor(F32, (rank, n_out, n_matrices))


class StackedSlots:
    """Who sits in which slot of the stacks; at most `n_slots` adapters beside slot 0."""

    def __init__(
        self, lib: Library, weights: Mapping[str, Weight], *, tied: bool, n_slots: int
    ) -> None:
        self._lib = lib
        self._weights = {
            name: weight for name, weight in weights.items() if weight.use is not Use.VECTOR
        }
        self._tied = tied
        self._limit = n_slots
        self._pairs: dict[Adapter, Pairs] = {}
        self.stacks = Stacks(lib, self._weights, {}, 1)
        self.n_rebuilds = 0
        self.slots: dict[Adapter, int] = {}
        self.tables: dict[int, int] = {}  # slot -> place in the token table's A

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """Makes exactly these adapters resident; the rest leave their slots. All or nothing."""
        wanted = dict.fromkeys(adapters)
        if len(wanted) > self._limit:
            raise CapacityError(
                f"expected at most {self._limit} adapters at once, got {len(wanted)}"
            )
        pairs = {one: self._pairs_of(one) for one in wanted}
        shapes = self._shapes_for(pairs.values())
        n_slots = self.stacks.n_slots
        while n_slots < 1 + len(wanted):
            n_slots = min(2 * n_slots, 1 + self._limit)
        if shapes != self.stacks.shapes or n_slots != self.stacks.n_slots:
            self._rebuild(pairs, shapes, n_slots)
        else:
            self._place(pairs)
        self._pairs = pairs

    def close(self) -> None:
        """Frees the stacks."""
        self.slots.clear()
        self.tables.clear()
        self._pairs = {}
        self.stacks.close()

    def _pairs_of(self, adapter: Adapter) -> Pairs:
        found = self._pairs.get(adapter)
        if found is not None:
            return found
        pairs = target_pairs(adapter, tied=self._tied)
        return {pair.target: pair for pair in pairs if pair.target in self._weights}

    def _shapes_for(self, resident: Iterable[Pairs]) -> dict[str, StackShape]:
        """The present shapes, widened for these adapters."""
        shapes = dict(self.stacks.shapes)
        n_tables: dict[str, int] = {}
        for pairs in resident:
            for name, pair in pairs.items():
                if self._weights[name].use is Use.LOOKUP:
                    n_tables[name] = n_tables.get(name, 0) + 1
                rank = -(-pair.rank // _RANK_QUANTUM) * _RANK_QUANTUM
                type_a = F16 if pair.a.type == F16 else F32
                wanted = StackShape(rank, type_a, n_tables.get(name, 0))
                shapes[name] = wanted if name not in shapes else wanted.widened(shapes[name])
        return shapes

    def _rebuild(
        self, pairs: Mapping[Adapter, Pairs], shapes: Mapping[str, StackShape], n_slots: int
    ) -> None:
        stacks = Stacks(self._lib, self._weights, shapes, n_slots)
        slots, tables = _arranged(pairs, self._table_names(), {}, {})
        try:
            for adapter, slot in slots.items():
                stacks.write(slot, pairs[adapter], tables.get(slot, 0))
        except BaseException:
            stacks.close()
            raise
        self.stacks.close()
        self.stacks, self.slots, self.tables = stacks, slots, tables
        self.n_rebuilds += 1

    def _place(self, pairs: Mapping[Adapter, Pairs]) -> None:
        """Writes those that are new; who stays keeps its slot."""
        before = self.slots
        slots, tables = _arranged(pairs, self._table_names(), before, self.tables)
        # What leaves is forgotten first: a write that fails half way must not look resident.
        self.slots = {one: slot for one, slot in before.items() if one in pairs}
        for adapter, slot in slots.items():
            if adapter not in before:
                self.stacks.write(slot, pairs[adapter], tables.get(slot, 0))
        self.slots, self.tables = slots, tables

    def _table_names(self) -> set[str]:
        return {name for name, weight in self._weights.items() if weight.use is Use.LOOKUP}


def _arranged(
    pairs: Mapping[Adapter, Pairs],
    table_names: set[str],
    slots: Mapping[Adapter, int],
    tables: Mapping[int, int],
) -> tuple[dict[Adapter, int], dict[int, int]]:
    """Slots (from 1 on) and places in the token table's A, kept where there is one already."""
    new_slots = {one: slot for one, slot in slots.items() if one in pairs}
    new_tables = {slot: tables[slot] for slot in new_slots.values() if slot in tables}
    for adapter in pairs:
        if adapter not in new_slots:
            slot = new_slots[adapter] = 1 + _first_free(slot - 1 for slot in new_slots.values())
            if table_names & pairs[adapter].keys():
                new_tables[slot] = _first_free(new_tables.values())
    return new_slots, new_tables


def _first_free(taken: Iterable[int]) -> int:
    """The lowest number from 0 on that is not taken."""
    numbers = set(taken)
    return next(i for i in range(len(numbers) + 1) if i not in numbers)
