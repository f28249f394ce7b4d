"""Owners of native memory. Each frees what it owns in close() or at the end of its `with`."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import BackendError, LifecycleError
from loragraph.ggml.lib import GGML_STATUS, Library, ffi
from loragraph.ggml.pages import prefer_huge_pages

F32, F16, Q4_0, Q4_1, Q8_0, I8, I32, I64, BF16 = 0, 1, 2, 3, 8, 24, 26, 27, 30
"""Numbers of the ggml types that the code names (ggml.h, enum ggml_type)."""

STORAGE_ONLY = frozenset((9, 15, *range(24, 29)))
"""Q8_1, Q8_K, I8, I16, I32, I64, F64: ggml has no products with them, and crashes when asked."""

_N_TYPES = 43  # GGML_TYPE_COUNT: ggml looks numbers up in a table without a check
_MAX_BYTES = 1 << 48
_USAGE_WEIGHTS = 1
_NUMPY = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A ggml tensor with the facts that checks need; borrowed from the context that made it."""

    ptr: Any
    type: int
    ne: tuple[int, int, int, int]
    name: str = ""

    def __repr__(self) -> str:
        return f"Tensor({self.name or '?'}, type {self.type}, {list(self.ne)})"


class Handle:
    """Base of the owners: one native pointer, freed once."""

    def __init__(self, lib: Library, ptr: Any, what: str) -> None:
        if ptr == lib.ffi.NULL:
            raise BackendError(f"ggml could not make a {what}: no memory")
        self.lib = lib
        self._what = what
        self._ptr: Any = ptr

    @property
    def ptr(self) -> Any:
        """The native pointer; LifecycleError after close."""
        if self._ptr is None:
            raise LifecycleError(f"a {self._what} was used after its close")
        return self._ptr

    def close(self) -> None:
        """Frees the native object; a second call does nothing."""
        ptr, self._ptr = self._ptr, None
        if ptr is not None:
            self._free(ptr)

    def _free(self, ptr: Any) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class TensorContext(Handle):
    """A ggml context without data: room for `max_tensors` tensors and a graph of `max_nodes`."""

    def __init__(self, lib: Library, max_tensors: int, max_nodes: int = 0) -> None:
        size = max_tensors * lib.c.ggml_tensor_overhead()
        if max_nodes:
            size += lib.c.ggml_graph_overhead_custom(max_nodes, False)
        # Memory of our own: ggml ends the process where it cannot allocate a context's.
        self._memory = lib.ffi.from_buffer(_aligned_bytes(size))
        params = lib.ffi.new("struct ggml_init_params *", [size, self._memory, True])
        super().__init__(lib, lib.c.ggml_init(params[0]), "context")
        self.max_tensors = max_tensors
        self.n_tensors = 0

    def claim(self, n: int = 1) -> Any:
        """The pointer, for making `n` more tensors; raises where ggml would abort."""
        if self.n_tensors + n > self.max_tensors:
            raise BackendError(
                f"a context for {self.max_tensors} tensors is full: the node budget is too small"
            )
        self.n_tensors += n
        return self.ptr

    def new_tensor(self, type_: int, ne: Sequence[int], name: str = "") -> Tensor:
        """A tensor without data, of `type_` and up to four sizes `ne`."""
        if not 1 <= len(ne) <= 4 or min(ne) < 1:
            raise BackendError(f"tensor '{name}': expected one to four sizes >= 1, got {list(ne)}")
        block = int(self.lib.c.ggml_blck_size(type_)) if 0 <= type_ < _N_TYPES else 0
        if block == 0:
            raise BackendError(f"tensor '{name}': ggml has no type {type_}")
        if ne[0] % block:
            raise BackendError(
                f"tensor '{name}': {ne[0]} is no multiple of the block size of type {type_}"
            )
        if math.prod(ne) // block * int(self.lib.c.ggml_type_size(type_)) > _MAX_BYTES:
            raise BackendError(f"tensor '{name}': {list(ne)} is more than any memory holds")
        ptr = self.lib.c.ggml_new_tensor(self.claim(), type_, len(ne), list(ne))
        if name:
            self.lib.c.ggml_set_name(ptr, name.encode()[:63])
        full = (*ne, 1, 1, 1)
        return Tensor(ptr, type_, (full[0], full[1], full[2], full[3]), name)

    def _free(self, ptr: Any) -> None:
        self.lib.c.ggml_free(ptr)
        self._memory = None


class Buffer(Handle):
    """A backend buffer: memory that tensors live in."""

    _memory: mmap.mmap | None = None  # unmapped with the last reference to it

    @classmethod
    def allocate(cls, lib: Library, nbytes: int, buft: Any = None, *, clear: bool = True) -> Buffer:
        """`nbytes` of host memory, or of the buffer type `buft`; zeroed unless told otherwise."""
        buft = lib.c.ggml_backend_cpu_buffer_type() if buft is None else buft
        buffer = cls(lib, lib.c.ggml_backend_buft_alloc_buffer(buft, max(nbytes, 1)), "buffer")
        if clear:
            lib.c.ggml_backend_buffer_clear(buffer.ptr, 0)
        return buffer

    @classmethod
    def for_tensors(cls, ctx: TensorContext, buft: Any = None) -> Buffer:
        """A buffer that holds all tensors of `ctx` which have no memory yet."""
        lib = ctx.lib
        buft = lib.c.ggml_backend_cpu_buffer_type() if buft is None else buft
        return cls(lib, lib.c.ggml_backend_alloc_ctx_tensors_from_buft(ctx.ptr, buft), "buffer")

    @classmethod
    def mapped(cls, lib: Library, address: int, nbytes: int) -> Buffer:
        """A buffer over memory that somebody else owns (a mapped file); page aligned."""
        if address % 64:
            raise BackendError("mapped memory must be aligned to 64 bytes")
        ptr = lib.ffi.cast("void *", address)
        return cls(lib, lib.c.ggml_backend_cpu_buffer_from_ptr(ptr, nbytes), "mapped buffer")

    @classmethod
    def zeroed(cls, lib: Library, nbytes: int) -> Buffer:
        """`nbytes` of zeros, page aligned, that cost neither time nor memory until touched."""
        memory = _zero_pages(nbytes)
        view = np.frombuffer(memory, np.uint8)
        address = int(view.ctypes.data)
        del view  # a live view would keep the pages
        buffer = cls.mapped(lib, address, len(memory))
        buffer._memory = memory
        return buffer

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return self.lib.address(self.lib.c.ggml_backend_buffer_get_base(self.ptr))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.lib.c.ggml_backend_buffer_get_size(self.ptr))

    def prefer_huge_pages(self) -> None:
        """For a large buffer that is filled whole, before anything is written to it."""
        prefer_huge_pages(self.base, self.nbytes)

    def use_for_weights(self) -> None:
        """Marks the content as weights."""
        self.lib.c.ggml_backend_buffer_set_usage(self.ptr, _USAGE_WEIGHTS)

    def place(self, tensor: Tensor, offset: int) -> None:
        """Gives `tensor` the memory at `offset`; 32-byte aligned, inside the buffer."""
        nbytes = int(self.lib.c.ggml_nbytes(tensor.ptr))
        if tensor.ptr.data != self.lib.ffi.NULL:
            raise BackendError(f"{tensor!r} has its memory already")
        if offset < 0 or offset % 32 or offset + nbytes > self.nbytes:
            raise BackendError(f"{tensor!r} does not fit at offset {offset} of {self.nbytes} bytes")
        address = self.lib.ffi.cast("void *", self.base + offset)
        check_status(
            self.lib.c.ggml_backend_tensor_alloc(self.ptr, tensor.ptr, address), "tensor_alloc"
        )

    def _free(self, ptr: Any) -> None:
        self.lib.c.ggml_backend_buffer_free(ptr)
        self._memory = None


class CpuBackend(Handle):
    """ggml's CPU backend with its own number of threads."""

    def __init__(self, lib: Library, n_threads: int) -> None:
        super().__init__(lib, lib.c.ggml_backend_cpu_init(), "CPU backend")
        self.n_threads = n_threads
        lib.c.ggml_backend_cpu_set_n_threads(self.ptr, n_threads)
        self._work = _aligned_bytes(0)
        self._work_data = ffi.NULL

    def plan(self, graph: Any) -> Any:
        """How to divide a graph whose tensors all have memory; for any number of computes."""
        _ = self.ptr  # raises after close
        plan = self.lib.c.ggml_graph_plan(graph, self.n_threads, ffi.NULL)
        return ffi.new("struct ggml_cplan *", plan)

    def compute(self, graph: Any, plan: Any = None) -> None:
        """Runs a graph by its plan, made here if need be; BackendError with ggml's status.

        Does what ggml_backend_graph_compute does, with work memory of our own: the backend ends
        the process where it cannot allocate it.
        """
        _ = self.ptr  # raises after close
        if plan is None:
            plan = self.plan(graph)
        if plan.work_size > len(self._work):
            self._work = _aligned_bytes(plan.work_size)
            self._work_data = ffi.cast("uint8_t *", self._work.ctypes.data)
        plan.work_data = self._work_data
        check_status(self.lib.c.ggml_graph_compute(graph, plan), "graph_compute")

    def _free(self, ptr: Any) -> None:
        self.lib.c.ggml_backend_free(ptr)


class GraphAllocator(Handle):
    """Hands out compute memory to graphs; all graphs share its one buffer."""

    def __init__(self, lib: Library) -> None:
        super().__init__(lib, _new_allocator(lib), "graph allocator")

    @property
    def nbytes(self) -> int:
        """Bytes of compute memory held now."""
        return int(self.lib.c.ggml_gallocr_get_buffer_size(self.ptr, 0))

    def reserve(self, graph: Any) -> bool:
        """Makes room for `graph`; True where the buffer grew (old addresses are dead)."""
        return self._grew(self.lib.c.ggml_gallocr_reserve, graph)

    def allocate(self, graph: Any) -> bool:
        """Gives every tensor of `graph` its memory; True where the buffer grew."""
        return self._grew(self.lib.c.ggml_gallocr_alloc_graph, graph)

    def _grew(self, call: Any, graph: Any) -> bool:
        before = self.nbytes
        if not call(self.ptr, graph):
            # It has freed its buffer but takes the graph for allocated: start anew.
            self._free(self.ptr)
            self._ptr = _new_allocator(self.lib)
            raise BackendError(
                "ggml could not allocate compute memory for a graph",
                hint="a smaller n_ctx or n_batch takes less",
            )
        return self.nbytes != before

    def _free(self, ptr: Any) -> None:
        self.lib.c.ggml_gallocr_free(ptr)


def _new_allocator(lib: Library) -> Any:
    return lib.c.ggml_gallocr_new(lib.c.ggml_backend_cpu_buffer_type())


def _zero_pages(nbytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, max(nbytes, 1))
        return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise BackendError(f"no memory for a buffer of {nbytes} bytes") from exc


def _aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory, (nbytes,) u8, at a multiple of 64 bytes."""
    try:
        raw = np.empty(nbytes + 64, np.uint8)
    except MemoryError as exc:
        raise BackendError(f"no memory for a context of {nbytes} bytes") from exc
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def data_address(tensor: Tensor) -> int:
    """Address of a tensor's first value; BackendError while it has no memory."""
    address = int(ffi.cast("uintptr_t", tensor.ptr.data))
    if address == 0:
        raise BackendError(f"{tensor!r} has no memory")
    return address


def memory(data: Any, n_bytes: int) -> NDArray[np.uint8]:
    """(n_bytes,) u8 at a C pointer, borrowed from its owner."""
    return np.frombuffer(ffi.buffer(data, n_bytes), np.uint8)


def check_status(status: int, what: str) -> None:
    """Raises BackendError unless ggml reported success."""
    if status != 0:
        raise BackendError(f"ggml {what}: {GGML_STATUS.get(status, status)}")


def array_view(lib: Library, tensor: Tensor, n: int | None = None) -> NDArray[Any]:
    """The first `n` values (all by default) of a contiguous host tensor, (n,), without a copy."""
    dtype = np.dtype(_NUMPY[tensor.type])
    count = n if n is not None else math.prod(tensor.ne)
    if tensor.ptr.data == lib.ffi.NULL:
        raise BackendError(f"{tensor!r} has no memory")
    return np.frombuffer(lib.ffi.buffer(tensor.ptr.data, count * dtype.itemsize), dtype)
