"""The compiled kernels: loading, the instruction set in use, addresses and raw memory.

Only this package touches the cffi objects; they are `Any` here and stay behind typed classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import BackendError

try:
    import loragraph.kernels._kernels as _kernels
except ImportError as exc:
    raise BackendError(
        f"expected the compiled module loragraph.kernels._kernels, got: {exc}",
        hint="reinstall loragraph for this Python and CPU; the build needs a C compiler",
    ) from exc

ffi: Any = _kernels.ffi
lib: Any = _kernels.lib


def instruction_sets() -> tuple[str, ...]:
    """What this CPU can run of what was built, the most portable first."""
    return tuple(
        ffi.string(lib.loragraph_isa_name(isa)).decode()
        for isa in range(lib.loragraph_isa_count())
        if lib.loragraph_isa_supported(isa)
    )


def dispatch() -> str:
    """The instruction set that the kernels use now."""
    return str(ffi.string(lib.loragraph_isa_name(lib.loragraph_isa_active())).decode())


@contextmanager
def forced_dispatch(name: str) -> Iterator[None]:
    """Uses another instruction set in this process while it is open.

    BackendError if the CPU lacks it or it was not built. Not during a compute.
    """
    if name not in instruction_sets():
        raise BackendError(f"instruction set: expected one of {instruction_sets()}, got {name!r}")
    before = lib.loragraph_isa_active()
    lib.loragraph_isa_select(_isa_number(name))
    try:
        yield
    finally:
        lib.loragraph_isa_select(before)


def _isa_number(name: str) -> int:
    names = [ffi.string(lib.loragraph_isa_name(i)) for i in range(lib.loragraph_isa_count())]
    return names.index(name.encode())


def function_address(name: str) -> int:
    """Address of an exported kernel, for `ggml_custom_4d` and its siblings."""
    return address(ffi.addressof(lib, name))


def pointer(array: NDArray[Any], c_type: str = "void *") -> Any:
    """C pointer to the array's memory, borrowed while the array lives."""
    return ffi.cast(c_type, array.__array_interface__["data"][0])  # `ctypes` is much slower


def address(pointer: Any) -> int:
    """The pointer as a number, since ggml is opened by another cffi instance."""
    return int(ffi.cast("uintptr_t", pointer))


def raw_bytes(
    data: NDArray[Any] | bytes | memoryview, n_bytes: int, what: str
) -> NDArray[np.uint8]:
    """The memory of `data` as (n_bytes,) u8; ValueError if it is scattered or of another size."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError(f"{what}: expected contiguous memory, got strides {data.strides}")
        raw = data.reshape(-1).view(np.uint8)
    else:
        raw = np.frombuffer(data, np.uint8)
    if raw.size != n_bytes:
        raise ValueError(f"{what}: expected {n_bytes} bytes, got {raw.size}")
    return raw


def aligned_empty(n_bytes: int, alignment: int = 64) -> NDArray[np.uint8]:
    """Uninitialised (n_bytes,) u8 that begins on a cache line, where vector loads are cheapest."""
    whole = np.empty(n_bytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + n_bytes]


class CustomNode:
    """Base of the nodes: what ggml's custom operations take. A node sets `_struct`."""

    function_name: ClassVar[str]
    _struct: Any

    @property
    def function(self) -> int:
        """Address of the custom node's function."""
        return function_address(self.function_name)

    @property
    def userdata(self) -> int:
        """Address of the custom node's user data."""
        return address(self._struct)
