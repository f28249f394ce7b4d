"""The native low-rank nodes: the structs that ggml custom nodes read, owned from Python.

In: tables of pairs (pairs.py) and the groups of a step. Out: addresses (`function`, `userdata`) for
a custom node. Knows nothing of ggml's objects, of adapters' names or of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import CapacityError
from loragraph.kernels.experts import ExpertStep, RouteNode
from loragraph.kernels.library import (
    CustomNode,
    aligned_empty,
    dispatch,
    ffi,
    forced_dispatch,
    function_address,
    instruction_sets,
    lib,
    pointer,
)
from loragraph.kernels.pairs import LoraPair, TargetPairs, TransposedB, row_bytes, transpose_b

__all__ = [
    "ExpandNode",
    "ExpertStep",
    "GatherNode",
    "Group",
    "LoraPair",
    "LowrankStep",
    "RouteNode",
    "ShrinkNode",
    "TargetPairs",
    "TransposedB",
    "aligned_empty",
    "dispatch",
    "forced_dispatch",
    "function_address",
    "instruction_sets",
    "row_bytes",
    "run_nodes",
    "transpose_b",
]


FloatArray = NDArray[np.floating[Any]]
Integers = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Group:
    """The rows of one step that apply the adapter in one slot."""

    slot: int
    rows: Integers  # ascending rows of x and y
    scales: Sequence[float] | FloatArray  # user scale of each row


class LowrankStep:
    """One row set of a step: which rows apply which slots, rewritten before each compute.

    `floats_per_entry` sizes the scratch for h: the largest sum of ranks of one (entry, shrink
    node), so at most the node's targets times the largest rank. `reserve` raises it when an adapter
    needs more. Memory: max_entries * floats_per_entry * 4 bytes.
    """

    def __init__(self, max_entries: int, max_groups: int, floats_per_entry: int) -> None:
        self.max_entries = max_entries
        self.max_groups = max_groups
        self.floats_per_entry = 0
        self._slots = np.zeros(max_groups, np.int32)
        self._ptr = np.zeros(max_groups + 1, np.int32)
        self._rows = np.zeros(max_entries, np.int32)
        self._scales = np.zeros(max_entries, np.float32)
        self._scratch = np.empty(0, np.float32)
        self._struct = ffi.new("lowrank_step *")
        self._struct.group_slot = pointer(self._slots, "int32_t *")
        self._struct.group_ptr = pointer(self._ptr, "int32_t *")
        self._struct.entry_row = self._struct.entry_token = pointer(self._rows, "int32_t *")
        self._struct.entry_scale = pointer(self._scales, "float *")
        self.reserve(floats_per_entry)

    @property
    def struct(self) -> Any:
        """`lowrank_step *`, borrowed while this object lives."""
        return self._struct

    @property
    def n_entries(self) -> int:
        """Entries of the step last written."""
        return int(self._struct.n_entries)

    def reserve(self, floats_per_entry: int) -> None:
        """Makes the scratch large enough; the struct's address stays. Not during a compute."""
        if floats_per_entry > self.floats_per_entry:
            self.floats_per_entry = floats_per_entry
            self._scratch = aligned_empty(self.max_entries * floats_per_entry * 4).view(np.float32)
            self._struct.scratch = pointer(self._scratch, "float *")
            self._struct.scratch_len = self._scratch.size

    def write(self, groups: Sequence[Group]) -> None:
        """Replaces the groups, summed in this order; CapacityError if they do not fit."""
        sizes = [len(group.rows) for group in groups]
        self.write_csr(
            [group.slot for group in groups],
            [0, *accumulate(sizes)],
            [row for group in groups for row in group.rows],
            [scale for group in groups for scale in group.scales],
        )

    def write_csr(
        self, slots: Integers, ptr: Integers, rows: Integers, scales: Sequence[float] | FloatArray
    ) -> None:
        """`write` for groups that lie in flat arrays already.

        slots (n_groups,) · ptr (n_groups + 1,) from 0 to n_entries · rows and scales (n_entries,).
        """
        n_groups, n_entries = len(slots), len(rows)
        if n_groups > self.max_groups or n_entries > self.max_entries:
            raise CapacityError(
                f"low-rank step: expected at most {self.max_groups} groups of {self.max_entries} "
                f"entries in all, got {n_groups} of {n_entries}",
                hint="lower the number of adapters per batch or raise the limit",
            )
        self._struct.n_groups = 0  # an exception below leaves an empty step, never a torn one
        self._slots[:n_groups] = slots
        self._ptr[: n_groups + 1] = ptr
        self._rows[:n_entries] = rows
        self._scales[:n_entries] = scales
        if self._ptr[0] != 0 or self._ptr[n_groups] != n_entries:
            raise ValueError(f"ptr: expected 0 to {n_entries}, got {ptr[0]} to {ptr[-1]}")
        self._struct.n_entries = n_entries
        self._struct.n_groups = n_groups


class ShrinkNode(CustomNode):
    """h = s * A x for all targets that read the same x."""

    function_name: ClassVar[str] = "loragraph_lowrank_shrink"

    def __init__(
        self,
        step: LowrankStep | ExpertStep,
        targets: Sequence[TargetPairs] = (),
        *,
        x_by_token: bool = False,
    ) -> None:
        """`x_by_token`, over an `ExpertStep`: x has a row a token, which its experts share."""
        self.step = step
        self.targets: tuple[TargetPairs, ...] = ()
        self._struct = ffi.new("lowrank_shrink_node *")
        self._struct.step = step.struct
        self.x_by_token = x_by_token
        self._struct.x_by_token = x_by_token
        for target in targets:
            self.add_target(target)

    def add_target(self, target: TargetPairs) -> int:
        """One more target that reads the same x; gives its index. Not during a compute."""
        n_in = self.targets[0].n_in if self.targets else target.n_in
        if target.n_in != n_in or target.token_table:
            raise ValueError(f"a shrink node expects targets that read one x of n_in {n_in}")
        self.targets += (target,)
        self._array = ffi.new("lowrank_target *[]", [one.struct for one in self.targets])
        self._struct.n_in = n_in
        self._struct.n_targets = len(self.targets)
        self._struct.targets = self._array
        return len(self.targets) - 1

    @property
    def struct(self) -> Any:
        """`lowrank_shrink_node *`, borrowed while this object lives."""
        return self._struct

    @property
    def floats_per_entry(self) -> int:
        """What the step must reserve for this node with the pairs that are set now."""
        return sum(target.max_rank for target in self.targets)

    def bind(self, x: int, x_stride: int) -> None:
        """`x` is the address of F32 [n_in, n_rows], rows `x_stride` floats apart."""
        self._struct.x = ffi.cast("float *", x)
        self._struct.x_stride = x_stride


class GatherNode(CustomNode):
    """h = s * a[:, token] for a target that is the token table."""

    function_name: ClassVar[str] = "loragraph_lowrank_gather"

    def __init__(self, step: LowrankStep, target: TargetPairs) -> None:
        if not target.token_table:
            raise ValueError("a gather node expects a target with token_table=True")
        self.step = step
        self.targets = (target,)
        self._array = ffi.new("lowrank_target *[]", [target.struct])
        self._layout = ffi.new("lowrank_shrink_node *")
        self._layout.step = step.struct
        self._layout.n_in = target.n_in
        self._layout.n_targets = 1
        self._layout.targets = self._array
        self._struct = ffi.new("lowrank_gather_node *")
        self._struct.shrink = self._layout

    @property
    def struct(self) -> Any:
        """`lowrank_shrink_node *` that describes h, borrowed while this object lives."""
        return self._layout

    @property
    def floats_per_entry(self) -> int:
        """What the step must reserve for this node with the pairs that are set now."""
        return self.targets[0].max_rank

    def bind(self, tokens: int) -> None:
        """`tokens` is the address of I32 [n_rows], ids in [0, n_vocab)."""
        self._struct.tokens = ffi.cast("int32_t *", tokens)


class ExpandNode(CustomNode):
    """y[row] += B h for one target of a shrink or gather node that ran just before."""

    function_name: ClassVar[str] = "loragraph_lowrank_expand"

    def __init__(self, source: ShrinkNode | GatherNode, target: int = 0) -> None:
        if not 0 <= target < len(source.targets):
            raise ValueError(f"target: expected [0, {len(source.targets)}), got {target}")
        self.source = source
        self.target = target
        self._struct = ffi.new("lowrank_expand_node *")
        self._struct.shrink = source.struct
        self._struct.target = target

    def bind(self, y: int, y_stride: int) -> None:
        """`y` is the address of F32 [n_out, n_rows], rows `y_stride` floats apart."""
        self._struct.y = ffi.cast("float *", y)
        self._struct.y_stride = y_stride


def run_nodes(
    nodes: Sequence[RouteNode | ShrinkNode | GatherNode | ExpandNode], n_threads: int = 1
) -> None:
    """Runs nodes one after another without ggml, the parts of each node in turn on this thread."""
    for node in nodes:
        function = getattr(lib, node.function_name)
        for ith in range(n_threads):
            function(ffi.NULL, ith, n_threads, ffi.cast("void *", node.userdata))
