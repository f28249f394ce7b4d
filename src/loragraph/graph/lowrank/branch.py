"""The branch lowering, llama.cpp's own: each active adapter's products stand in the graph.

One set of adapters for the whole batch; a graph belongs to its set, so another set means another
graph. It is the oracle of the other lowerings and the baseline of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from loragraph.adapters.adapter import Adapter, scale_of
from loragraph.adapters.mix import Mix
from loragraph.errors import BackendError
from loragraph.ggml.handles import Buffer, Tensor, TensorContext
from loragraph.ggml.lib import Library
from loragraph.ggml.ops import Ops
from loragraph.graph.batch import Batch
from loragraph.graph.lowrank.base import (
    NODES_PER_PAIR_BUDGET,
    GraphLowering,
    NoLowering,
    PlainNorms,
    RowSet,
)
from loragraph.graph.lowrank.targets import Factor, TargetPair, target_pairs
from loragraph.model.weights import Weight


@dataclass(frozen=True, slots=True)
class _BranchPair:
    a: Tensor
    b: Tensor
    rank: int


class _AdapterTensors:
    """An adapter's factors as ggml tensors over the adapter's own memory."""

    def __init__(self, lib: Library, adapter: Adapter, *, tied: bool) -> None:
        pairs = target_pairs(adapter, tied=tied)
        self.alpha = adapter.alpha
        self._lib = lib
        self._ctx = TensorContext(lib, 2 * len(pairs))
        self._buffers: list[Buffer] = []
        self._kept: list[Factor] = []
        self.by_target: dict[str, list[_BranchPair]] = {}
        try:
            for pair in pairs:
                tensors = _BranchPair(
                    self._tensor(pair, pair.a), self._tensor(pair, pair.b), pair.rank
                )
                self.by_target.setdefault(pair.target, []).append(tensors)
        except BaseException:
            self.close()
            raise

    def _tensor(self, pair: TargetPair, factor: Factor) -> Tensor:
        ne = factor.ne if factor.ne[2] > 1 else factor.ne[:2]
        tensor = self._ctx.new_tensor(factor.type, ne, pair.target)
        buffer = Buffer.mapped(self._lib, int(factor.data.ctypes.data), len(factor.data))
        self._buffers.append(buffer)
        self._kept.append(factor)
        buffer.place(tensor, 0)
        return tensor

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._ctx.close()


class BranchLowering:
    """y + scale(B (A x)) per adapter of the batch's one set, in canonical order."""

    name = "branch"

    def __init__(self, lib: Library, *, tied: bool, registered: Callable[[], int]) -> None:
        """`registered` counts the pairs of all adapters registered with the model."""
        self._lib = lib
        self._tied = tied
        self._registered = registered
        self._tensors: dict[Adapter, _AdapterTensors] = {}
        self.n_set_changes = 0
        self._set: Mix | None = None

    def graph_key(self, batch: Batch) -> Hashable:
        """The set itself: a graph is reused only with the set that it was built for."""
        mix = _only_mix(batch)
        return mix.key if mix else False

    def extra_nodes(self) -> int:
        """llama.cpp's budget: six nodes a pair, over all that is registered."""
        return NODES_PER_PAIR_BUDGET * self._registered()

    def check(self, mix: Mix) -> None:
        """Any mix will do."""

    def attach(self, mix: Mix) -> None:
        """Makes tensors of adapters not seen before; counts changes of the set. All or nothing."""
        new: dict[Adapter, _AdapterTensors] = {}
        try:
            for adapter in mix.adapters:
                if adapter not in self._tensors:
                    new[adapter] = _AdapterTensors(self._lib, adapter, tied=self._tied)
        except BaseException:
            for tensors in new.values():
                tensors.close()
            raise
        if self._set is not None and mix != self._set:
            self.n_set_changes += 1
        self._set = mix
        self._tensors |= new
        for adapter in self._tensors.keys() - set(mix.adapters):
            self._tensors.pop(adapter).close()

    def begin(self, batch: Batch) -> GraphLowering:
        """The branch of the batch's set."""
        mix = _only_mix(batch)
        if not mix:
            return NoLowering()
        return _BranchGraph([(self._tensors[adapter], scale) for adapter, scale in mix])

    def write(self, batch: Batch) -> None:
        """Nothing: the set is part of the graph's structure."""

    def close(self) -> None:
        """Frees the tensors; the adapters' memory stays theirs."""
        for tensors in self._tensors.values():
            tensors.close()
        self._tensors.clear()


class _BranchGraph(PlainNorms):
    def __init__(self, active: list[tuple[_AdapterTensors, float]]) -> None:
        self._active = active

    def linear(self, ops: Ops, w: Weight, x: Tensor, y: Tensor, rows: RowSet) -> Tensor:
        for pair, scale in self._pairs(w):
            delta = ops.mul_mat(pair.b, ops.mul_mat(pair.a, x))
            y = ops.add(y, ops.scale(delta, scale))
        return y

    def experts(
        self, ops: Ops, w: Weight, x: Tensor, ids: Tensor, y: Tensor, rows: RowSet
    ) -> Tensor:
        for pair, scale in self._pairs(w):
            delta = ops.mul_mat_id(pair.b, ops.mul_mat_id(pair.a, x, ids), ids)
            y = ops.add(y, ops.scale(delta, scale))
        return y

    def lookup(self, ops: Ops, w: Weight, ids: Tensor, y: Tensor) -> Tensor:
        for pair, scale in self._pairs(w):
            delta = ops.mul_mat(pair.b, ops.get_rows(pair.a, ids))
            y = ops.add(y, ops.scale(delta, scale))
        return y

    def bind(self) -> None:
        """ggml's own nodes need no addresses."""

    def _pairs(self, w: Weight) -> list[tuple[_BranchPair, float]]:
        return [
            (pair, scale_of(tensors.alpha, pair.rank, user_scale))
            for tensors, user_scale in self._active
            for pair in tensors.by_target.get(w.name, ())
        ]


def _only_mix(batch: Batch) -> Mix:
    if len(batch.mixes) != 1:
        raise BackendError(f"the branch lowering takes one set a batch, got {len(batch.mixes)}")
    return batch.mixes[0]
