"""Owners of native memory: what they refuse, and that nothing is reachable after close."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from loragraph.errors import BackendError, LifecycleError
from loragraph.ggml.handles import (
    F32,
    I32,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Handle,
    TensorContext,
    array_view,
    check_status,
    data_address,
)
from loragraph.ggml.lib import Library, load_library
from tests.rss import resident_bytes

OWNERS: dict[str, Callable[[Library], Handle]] = {
    "context": lambda lib: TensorContext(lib, 4),
    "buffer": lambda lib: Buffer.allocate(lib, 64),
    "backend": lambda lib: CpuBackend(lib, 1),
    "allocator": GraphAllocator,
}


@pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
def test_use_after_close_raises(make: Callable[[Library], Handle]) -> None:
    """After close, or the end of the `with`, the pointer is out of reach; closing again is fine."""
    with make(load_library()) as owner:
        assert owner.ptr
    with pytest.raises(LifecycleError, match="after its close"):
        _ = owner.ptr
    owner.close()


USES: dict[str, tuple[str, Callable[[Handle], object]]] = {
    "new_tensor": ("context", lambda ctx: ctx.new_tensor(F32, (4,))),  # type: ignore[attr-defined]
    "claim": ("context", lambda ctx: ctx.claim()),  # type: ignore[attr-defined]
    "for_tensors": ("context", lambda ctx: Buffer.for_tensors(ctx)),  # type: ignore[arg-type]
    "base": ("buffer", lambda buffer: buffer.base),  # type: ignore[attr-defined]
    "nbytes": ("buffer", lambda buffer: buffer.nbytes),  # type: ignore[attr-defined]
    "use_for_weights": ("buffer", lambda buffer: buffer.use_for_weights()),  # type: ignore[attr-defined]
    "compute": ("backend", lambda backend: backend.compute(None)),  # type: ignore[attr-defined]
    "reserve": ("allocator", lambda allocator: allocator.reserve(None)),  # type: ignore[attr-defined]
    "allocate": ("allocator", lambda allocator: allocator.allocate(None)),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize(("owner", "use"), USES.values(), ids=USES)
def test_every_method_raises_after_close(owner: str, use: Callable[[Handle], object]) -> None:
    """Methods never hand a freed pointer to C."""
    closed = OWNERS[owner](load_library())
    closed.close()
    with pytest.raises(LifecycleError, match="after its close"):
        use(closed)


@pytest.mark.parametrize("offset", [-32, 16, 33, 64, 4096])
def test_place_stays_inside_the_buffer(offset: int) -> None:
    """Offsets that are unaligned, negative or leave no room raise."""
    lib = load_library()
    with TensorContext(lib, 1) as ctx, Buffer.allocate(lib, 64) as buffer:
        tensor = ctx.new_tensor(F32, (16,))
        with pytest.raises(BackendError, match="does not fit"):
            buffer.place(tensor, offset)
        buffer.place(tensor, 0)
        assert data_address(tensor) == buffer.base


def test_a_tensor_is_placed_once() -> None:
    """Placing it a second time raises; ggml would abort."""
    lib = load_library()
    with TensorContext(lib, 1) as ctx, Buffer.allocate(lib, 128) as buffer:
        tensor = ctx.new_tensor(F32, (16,))
        buffer.place(tensor, 0)
        with pytest.raises(BackendError, match="has its memory already"):
            buffer.place(tensor, 64)


def test_mapped_memory_must_be_aligned() -> None:
    """Memory of somebody else is taken at 64-byte boundaries only, and not freed."""
    lib = load_library()
    memory = np.zeros(256, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    with pytest.raises(BackendError, match="aligned"):
        Buffer.mapped(lib, start + 32, 64)
    with Buffer.mapped(lib, start, 64) as buffer, TensorContext(lib, 1) as ctx:
        tensor = ctx.new_tensor(I32, (4,))
        buffer.place(tensor, 32)
        array_view(lib, tensor)[:] = 7
    assert memory.sum() == 28


def test_zeroed_memory_holds_zeros_and_is_writable() -> None:
    """A zeroed buffer begins with zeros, keeps what is written, and refuses impossible sizes."""
    lib = load_library()
    with Buffer.zeroed(lib, 1 << 20) as buffer, TensorContext(lib, 1) as ctx:
        tensor = ctx.new_tensor(I32, (1 << 18,))
        buffer.place(tensor, 0)
        values = array_view(lib, tensor)
        assert not values.any()
        values[:] = 7
        assert array_view(lib, tensor).sum() == 7 << 18
    with pytest.raises(BackendError, match="no memory"):
        Buffer.zeroed(lib, 1 << 60)


def test_tensors_without_memory_have_no_values() -> None:
    """Address and view of a tensor that has no memory yet raise."""
    lib = load_library()
    with TensorContext(lib, 1) as ctx:
        tensor = ctx.new_tensor(F32, (4,), "lonely")
        with pytest.raises(BackendError, match="lonely"):
            data_address(tensor)
        with pytest.raises(BackendError, match="lonely"):
            array_view(lib, tensor)


def test_more_memory_than_there_is() -> None:
    """An allocation that fails is a BackendError."""
    with pytest.raises(BackendError, match="no memory"):
        Buffer.allocate(load_library(), 1 << 60)


@pytest.mark.parametrize(
    ("status", "words"), [(-2, "allocation failed"), (-1, "failed"), (1, "aborted"), (77, "77")]
)
def test_a_failure_of_ggml_is_named(status: int, words: str) -> None:
    """A status other than success becomes a BackendError with ggml's word for it."""
    check_status(0, "compute")
    with pytest.raises(BackendError, match=f"compute: {words}"):
        check_status(status, "compute")


def test_owners_free_their_memory() -> None:
    """Made and closed many times, they leave nothing behind."""
    lib = load_library()

    def cycle() -> None:
        with TensorContext(lib, 4000) as ctx, Buffer.allocate(lib, 1 << 20), GraphAllocator(lib):
            ctx.new_tensor(F32, (4,))

    for _ in range(5):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(50):
        cycle()
    gc.collect()
    assert resident_bytes() - before < 8 << 20
