"""Resident adapters: their pairs in the tables that the routed kernels read, by slot."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.values import dequantised
from loragraph.errors import CapacityError
from loragraph.ggml.handles import F32
from loragraph.graph.lowrank.targets import Factor, TargetPair, target_pairs
from loragraph.kernels.lowrank import LoraPair, TargetPairs, transpose_b
from loragraph.model.weights import Use, Weight

MAX_TARGETS_PER_SHRINK = 3
"""Weights that read the same x in one node: q, k and v."""


class PreparedAdapters:
    """Adapters in the kernels' form (lora_b transposed), made once for all contexts of a model."""

    def __init__(self, *, tied: bool) -> None:
        self._tied = tied
        self._lock = threading.Lock()
        self._pairs: dict[Adapter, dict[str, LoraPair]] = {}

    def get(self, adapter: Adapter) -> Mapping[str, LoraPair]:
        """Kernel pairs by target."""
        with self._lock:
            if adapter not in self._pairs:
                self._pairs[adapter] = _kernel_pairs(adapter, tied=self._tied)
                adapter.on_close(self._forget)
            return self._pairs[adapter]

    def _forget(self, adapter: Adapter) -> None:
        with self._lock:
            self._pairs.pop(adapter, None)


class Resident:
    """A table of pairs by slot for each weight, and who sits in which slot."""

    def __init__(
        self, weights: Mapping[str, Weight], prepared: PreparedAdapters, n_slots: int = 64
    ) -> None:
        self.n_slots = n_slots
        self._prepared = prepared
        self.targets = {
            name: _table(weight, n_slots)
            for name, weight in weights.items()
            if weight.use in (Use.LINEAR, Use.LOOKUP)
        }
        self.slots: dict[Adapter, int] = {}
        self.floats_per_entry = 0
        self.n_changes = 0  # of slots: what was written by slot before is stale after

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """Makes exactly these adapters resident; the rest leave their slots. All or nothing."""
        wanted = set(adapters)
        self.n_changes += 1
        if len(wanted) > self.n_slots:
            raise CapacityError(
                f"expected at most {self.n_slots} adapters at once, got {len(wanted)}"
            )
        prepared = [self._prepared.get(adapter) for adapter in wanted]
        for adapter in self.slots.keys() - wanted:
            self._remove(adapter)
        for adapter in wanted - self.slots.keys():
            self._place(adapter)
        ranks = [pair.rank for pairs in prepared for pair in pairs.values()]
        self.floats_per_entry = MAX_TARGETS_PER_SHRINK * max(ranks, default=0)

    def close(self) -> None:
        """Empties every slot."""
        self.hold(())

    def _place(self, adapter: Adapter) -> None:
        pairs = self._prepared.get(adapter)
        slot = next(i for i in range(self.n_slots) if i not in self.slots.values())
        for name, pair in pairs.items():
            self.targets[name].set_pair(slot, pair)
        self.slots[adapter] = slot

    def _remove(self, adapter: Adapter) -> None:
        slot = self.slots.pop(adapter)
        for table in self.targets.values():
            table.clear(slot)


def _table(weight: Weight, n_slots: int) -> TargetPairs:
    n_in, n_out = weight.ne[0], weight.ne[1]
    if weight.use is Use.LOOKUP:  # a row of lora_a a token id, lora_b gives an embedding
        return TargetPairs(n_out, n_in, n_slots, token_table=True)
    return TargetPairs(n_in, n_out, n_slots)


def _kernel_pairs(adapter: Adapter, *, tied: bool) -> dict[str, LoraPair]:
    merged: dict[str, TargetPair] = {}
    for pair in target_pairs(adapter, tied=tied):
        if pair.n_expert == 1:
            twice = pair.target in merged
            merged[pair.target] = _stacked(merged[pair.target], pair) if twice else pair
    return {target: _kernel_pair(pair) for target, pair in merged.items()}


def _kernel_pair(pair: TargetPair) -> LoraPair:
    b = transpose_b(pair.b.data, pair.b.type, pair.b.ne[0], pair.b.ne[1])
    return LoraPair(pair.a.data, pair.a.type, b, pair.b.type, pair.rank, pair.scale)


def _stacked(first: TargetPair, second: TargetPair) -> TargetPair:
    """Two pairs of one target as one of the summed rank, in float32 with the scales in b."""
    pairs = (first, second)
    a = np.concatenate([_values(pair.a) for pair in pairs])
    b = np.concatenate([_values(pair.b) * np.float32(pair.scale) for pair in pairs], axis=1)
    rank = first.rank + second.rank
    return TargetPair(
        first.target,
        Factor(a.reshape(-1).view(np.uint8), F32, (first.a.ne[0], rank, 1)),
        Factor(np.ascontiguousarray(b).reshape(-1).view(np.uint8), F32, (rank, first.b.ne[1], 1)),
        rank,
        1.0,
    )


def _values(factor: Factor) -> NDArray[np.float32]:
    """(ne1, ne0) f32."""
    n0, n1, _ = factor.ne
    return dequantised(factor.type, factor.data, (*factor.ne, 1)).reshape(n1, n0)
