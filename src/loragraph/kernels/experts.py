"""Steps of products with chosen experts: which rows apply which (adapter, expert).

The experts are known only while the graph computes, so a node splits the step's groups at run time;
then the same shrink and expand nodes follow, over slots that mean an adapter's expert.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from loragraph.kernels.library import CustomNode, aligned_empty, ffi, pointer


class ExpertStep:
    """Room for the groups that a `RouteNode` makes; one at a time, for layer after layer."""

    def __init__(self, n_expert: int) -> None:
        self.n_expert = n_expert
        self._struct = ffi.new("lowrank_expert_step *")
        self._counts = np.zeros(n_expert, np.int32)
        self._struct.counts = pointer(self._counts, "int32_t *")
        self._scratch = np.empty(0, np.float32)
        self._grow(1)

    @property
    def struct(self) -> Any:
        """`lowrank_step *`, borrowed while this object lives."""
        return ffi.addressof(self._struct.step)

    @property
    def routed(self) -> Any:
        """`lowrank_expert_step *`, borrowed while this object lives."""
        return self._struct

    def fit(self, n_entries: int, floats_per_entry: int) -> None:
        """Makes room for a step; addresses of the structs stay. Not during a compute.

        `n_entries`: those of the step that is routed, times the experts a token.
        `floats_per_entry`: the largest sum of ranks of one (entry, shrink node).
        """
        if n_entries > self._struct.max_entries:
            self._grow(max(n_entries, 2 * self._struct.max_entries))
        if n_entries * floats_per_entry > self._scratch.size:
            self._scratch = aligned_empty(n_entries * floats_per_entry * 4).view(np.float32)
            self._struct.step.scratch = pointer(self._scratch, "float *")
        self._struct.step.scratch_len = self._scratch.size

    def _grow(self, n: int) -> None:
        self._slots = np.zeros(n, np.int32)
        self._ptr = np.zeros(n + 1, np.int32)
        self._rows = np.zeros(n, np.int32)
        self._tokens = np.zeros(n, np.int32)
        self._scales = np.zeros(n, np.float32)
        arrays = {
            "group_slot": self._slots,
            "group_ptr": self._ptr,
            "entry_row": self._rows,
            "entry_token": self._tokens,
            "entry_scale": self._scales,
        }
        for name, array in arrays.items():
            memory = pointer(array, "float *" if array.dtype == np.float32 else "int32_t *")
            setattr(self._struct, name, memory)
            setattr(self._struct.step, name, memory)
        self._struct.step.n_groups = self._struct.step.n_entries = 0
        self._struct.max_entries = n


class RouteNode(CustomNode):
    """Splits the groups of a step of tokens by the experts `ids`, into `to`."""

    function_name: ClassVar[str] = "loragraph_lowrank_route"

    def __init__(self, step: Any, to: ExpertStep, n_used: int) -> None:
        """`step` is a `lowrank_step *` that outlives the node; `n_used` experts a token."""
        self.to = to
        self._struct = ffi.new("lowrank_route_node *")
        self._struct.to = to.routed
        self._struct.n_used = n_used
        self._struct.n_expert = to.n_expert
        setattr(self._struct, "from", step)

    def bind(self, ids: int, ids_stride: int) -> None:
        """`ids` is the address of I32 [n_used, n_rows], rows `ids_stride` ids apart."""
        self._struct.ids = ffi.cast("int32_t *", ids)
        self._struct.ids_stride = ids_stride
