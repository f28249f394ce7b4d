"""The native attention over cells: the structs that its ggml custom nodes read, owned from Python.

In: which cells each row of a step sees, as stretches. Out: addresses (`function`, `userdata`) for
custom nodes. Knows nothing of ggml's objects, of sequences or of the prefix tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import UnsupportedError
from loragraph.kernels.library import (
    CustomNode,
    aligned_empty,
    ffi,
    lib,
    pointer,
)
from loragraph.kernels.pairs import Q8_0, row_bytes

_FAULTS = {
    -1: "a run of cells leaves the cache",
    -2: "a stretch names a row that the step does not have",
    -3: "a row's range is empty or leaves its stretch",
    -4: "a row sees no cell",
    -5: "the pointers do not fit the lists",
}
_MORE_ROOM = 1


class CellLists(Protocol):
    """Stretches of cells, with the rows (query tokens of the step) that see them; all contiguous.

    A stretch's cells are its runs one after another. A row sees the union over the stretches that
    name it; their order is the order of its path. Every row sees at least its own cell.
    """

    @property
    def run_ptr(self) -> NDArray[np.int32]:
        """(n_stretches + 1,) i32 into the runs."""

    @property
    def run_start(self) -> NDArray[np.int32]:
        """(n_runs,) i32 first cell."""

    @property
    def run_length(self) -> NDArray[np.int32]:
        """(n_runs,) i32."""

    @property
    def row_ptr(self) -> NDArray[np.int32]:
        """(n_stretches + 1,) i32 into the three below."""

    @property
    def row(self) -> NDArray[np.int32]:
        """(n_seen,) i32."""

    @property
    def row_begin(self) -> NDArray[np.int32]:
        """(n_seen,) i32 half-open range of the stretch's cells, by ordinal."""

    @property
    def row_end(self) -> NDArray[np.int32]:
        """(n_seen,) i32."""


class AttentionStep:
    """The plan of a step, rewritten before each compute; the graph keeps its address.

    Arrays grow as steps need them. Memory: for each (row, chunk of 256 to 1,024 cells) that is not
    a row's only one, n_head * (head size + 16) floats; for each thread about 0.2 to 0.5 MB.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._struct = ffi.new("attention_step *")
        self._struct.n_scratch = n_threads
        self._floats_per_partial = 0
        self._arrays: dict[str, NDArray[Any]] = {}
        self._resize(rows=64, cells=4096, units=256, entries=1024)

    @property
    def struct(self) -> Any:
        """`attention_step *`, borrowed while this object lives."""
        return self._struct

    @property
    def n_units(self) -> int:
        """Units of work in the step last written."""
        return int(self._struct.n_units)

    @property
    def n_partials(self) -> int:
        """Partial results that the step last written leaves to reduce."""
        return int(self._struct.need_partials)

    def reserve(self, n_head: int, n_embd_k: int, n_embd_v: int) -> None:
        """Makes scratch and partials large enough for a layer of these sizes."""
        floats = int(lib.loragraph_attention_scratch_floats(n_embd_k, n_embd_v))
        if floats > self._struct.scratch_stride:
            scratch = self._floats("scratch", floats * self.n_threads)
            self._struct.scratch = pointer(scratch, "float *")
            self._struct.scratch_stride = floats
        partial = int(lib.loragraph_attention_partial_floats(n_head, n_embd_v))
        self._floats_per_partial = max(self._floats_per_partial, partial)

    def write(self, stretches: CellLists, n_rows: int, n_cells: int) -> None:
        """Plans a step of `n_rows` rows over a cache of `n_cells`; ValueError for false lists."""
        lists = _c_lists(stretches, n_rows, n_cells)
        if n_rows > self._struct.max_rows:
            self._resize(rows=n_rows)
        status = lib.loragraph_attention_plan(self._struct, lists)
        if status == _MORE_ROOM:
            need = self._struct
            self._resize(cells=need.need_cells, units=need.need_units, entries=need.need_entries)
            status = lib.loragraph_attention_plan(self._struct, lists)
        if status != 0:
            raise ValueError(f"stretches: {_FAULTS[status]}")
        floats = self.n_partials * self._floats_per_partial
        if floats > self._struct.partials_len:
            partials = self._floats("partials", floats + floats // 4)
            self._struct.partials = pointer(partials, "float *")
            self._struct.partials_len = partials.size

    def _resize(self, *, rows: int = 0, cells: int = 0, units: int = 0, entries: int = 0) -> None:
        """Room for at least so much of each; half as much again, since steps grow slowly."""
        for count, fields in (
            ((rows, "max_rows"), (("partial_ptr", "int32_t", 1), ("cursor", "int32_t", 0))),
            ((cells, "max_cells"), (("cells", "int32_t", 0),)),
            ((units, "max_units"), (("units", "attention_unit", 0),)),
            ((entries, "max_entries"), (("entries", "attention_entry", 0),)),
        ):
            n, limit = count
            if n <= getattr(self._struct, limit):
                continue
            n += n // 2
            for name, c_type, extra in fields:
                array = aligned_empty((n + extra) * ffi.sizeof(c_type))
                self._arrays[name] = array
                setattr(self._struct, name, pointer(array, f"{c_type} *"))
            setattr(self._struct, limit, n)

    def _floats(self, name: str, n: int) -> NDArray[np.float32]:
        self._arrays[name] = aligned_empty(n * 4).view(np.float32)
        return self._arrays[name]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one layer's attention and how its K and V are stored."""

    n_head: int
    n_head_kv: int
    n_embd_k: int  # head size
    n_embd_v: int
    k_type: int  # ggml number
    v_type: int
    scale: float
    softcap: float = 0.0  # c * tanh(s / c); 0: none

    def check(self) -> None:
        """UnsupportedError for sizes or types that the kernel does not read."""
        if self.n_head % self.n_head_kv:
            raise ValueError(f"{self.n_head} query heads are no multiple of {self.n_head_kv}")
        most = int(lib.loragraph_attention_max_group())
        if self.n_head // self.n_head_kv > most:
            raise UnsupportedError(
                f"attention over cells expects at most {most} query heads a K/V head, "
                f"got {self.n_head // self.n_head_kv}",
                what="attention group",
                hint="use attention='flash'",
            )
        for n_embd, type_ in ((self.n_embd_k, self.k_type), (self.n_embd_v, self.v_type)):
            row_bytes(n_embd, type_)
            if n_embd % 8 and type_ != Q8_0:
                raise UnsupportedError(
                    f"attention over cells expects a head size divisible by 8, got {n_embd}",
                    what="head size",
                    hint="use attention='flash'",
                )


class AttendNode(CustomNode):
    """softmax(K q) V of every row: its result, or partials of it."""

    function_name: ClassVar[str] = "loragraph_attention_attend"

    def __init__(self, step: AttentionStep, shape: LayerShape) -> None:
        shape.check()
        step.reserve(shape.n_head, shape.n_embd_k, shape.n_embd_v)
        self.step = step
        self.shape = shape
        self._struct = ffi.new("attention_node *")
        self._struct.step = step.struct
        for name in LayerShape.__dataclass_fields__:
            setattr(self._struct, name, getattr(shape, name))

    def bind_q(self, q: int, head_stride: int, row_stride: int) -> None:
        """`q` is the address of F32 [n_embd_k, n_head, n_rows]; strides in floats."""
        self._struct.q = ffi.cast("float *", q)
        self._struct.q_head_stride = head_stride
        self._struct.q_row_stride = row_stride

    def bind_cells(self, k: int, k_stride: int, v: int, v_stride: int) -> None:
        """Addresses of K [n_embd_k * n_head_kv, n_cells] and V; strides of a cell in bytes."""
        self._struct.k = ffi.cast("void *", k)
        self._struct.v = ffi.cast("void *", v)
        self._struct.k_stride = k_stride
        self._struct.v_stride = v_stride

    def bind_sinks(self, sinks: int) -> None:
        """`sinks` is the address of F32 [n_head], a score of each head that no cell has."""
        self._struct.sinks = ffi.cast("float *", sinks)

    def bind_out(self, out: int, stride: int) -> None:
        """`out` is the address of F32 [n_embd_v * n_head, n_rows], rows `stride` floats apart."""
        self._struct.out = ffi.cast("float *", out)
        self._struct.out_stride = stride


class ReduceNode(CustomNode):
    """Combines the partials that an attend node left; runs after it, on the same output."""

    function_name: ClassVar[str] = "loragraph_attention_reduce"

    def __init__(self, attend: AttendNode) -> None:
        self.attend = attend
        self._struct = attend._struct  # one struct describes both nodes


def run_attention(attend: AttendNode, n_threads: int = 1) -> None:
    """Runs both nodes without ggml, the parts of each in turn on this thread."""
    for node in (attend, ReduceNode(attend)):
        function = getattr(lib, node.function_name)
        for ith in range(n_threads):
            function(ffi.NULL, ith, n_threads, ffi.cast("void *", node.userdata))


def _c_lists(lists: CellLists, n_rows: int, n_cells: int) -> Any:
    struct = ffi.new("attention_lists *")
    struct.n_rows = n_rows
    struct.n_cells = n_cells
    struct.n_stretches = len(lists.run_ptr) - 1
    struct.n_runs = len(lists.run_start)
    struct.n_seen = len(lists.row)
    for name, n in (
        ("run_ptr", struct.n_stretches + 1),
        ("run_start", struct.n_runs),
        ("run_length", struct.n_runs),
        ("row_ptr", struct.n_stretches + 1),
        ("row", struct.n_seen),
        ("row_begin", struct.n_seen),
        ("row_end", struct.n_seen),
    ):
        array = getattr(lists, name)
        if array.dtype != np.int32 or array.shape != (n,) or not array.flags.c_contiguous:
            raise ValueError(
                f"{name}: expected contiguous ({n},) i32, got {array.shape} {array.dtype}"
            )
        setattr(struct, name, pointer(array, "int32_t *"))
    return struct
