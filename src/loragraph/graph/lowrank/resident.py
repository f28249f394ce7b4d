"""Resident adapters: their pairs in the tables that the routed kernels read, by slot."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from loragraph.adapters.adapter import Adapter
from loragraph.errors import CapacityError
from loragraph.graph.lowrank.targets import TargetPair, target_pairs
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
            if weight.use is not Use.VECTOR
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
    return TargetPairs(n_in, n_out, n_slots, n_expert=weight.ne[2])


def _kernel_pairs(adapter: Adapter, *, tied: bool) -> dict[str, LoraPair]:
    return {pair.target: _kernel_pair(pair) for pair in target_pairs(adapter, tied=tied)}


def _kernel_pair(pair: TargetPair) -> LoraPair:
    b = transpose_b(pair.b.data, pair.b.type, *pair.b.ne)
    return LoraPair(pair.a.data, pair.a.type, b, pair.b.type, pair.rank, pair.scale)
