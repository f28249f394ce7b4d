"""Step inputs in a buffer of their own, outside the graph allocator.

The allocator would reuse an input's memory after its last reader, so an input left unwritten
would be garbage in the next step. Here every kept graph reads the same fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import BackendError
from loragraph.ggml.handles import F16, F32, I32, I64, Buffer, Tensor, TensorContext
from loragraph.ggml.lib import Library

_DTYPES: Mapping[int, Any] = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its ggml type and the most values that any step needs."""

    type: int
    max_values: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region, rounded up to the alignment."""
        size: int = self.max_values * np.dtype(_DTYPES[self.type]).itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Inputs:
    """Named regions that graphs read and that each step writes through numpy views."""

    def __init__(self, lib: Library, specs: Mapping[str, InputSpec]) -> None:
        self._specs = dict(specs)
        self._offsets: dict[str, int] = {}
        total = 0
        for name, spec in specs.items():
            self._offsets[name] = total
            total += spec.nbytes
        self._buffer = Buffer.allocate(lib, total)
        memory = np.frombuffer(
            lib.ffi.buffer(lib.ffi.cast("char *", self._buffer.base), total), np.uint8
        )
        self._views: dict[str, NDArray[Any]] = {
            name: memory[self._offsets[name] :][: spec.nbytes].view(_DTYPES[spec.type])
            for name, spec in specs.items()
        }

    def tensor(self, ctx: TensorContext, name: str, *ne: int) -> Tensor:
        """A graph input at the region's address, with this step shape's sizes."""
        spec = self._specs[name]
        if int(np.prod(ne)) > spec.max_values:
            raise BackendError(f"input '{name}' holds {spec.max_values} values, not {list(ne)}")
        tensor = ctx.new_tensor(spec.type, ne, name)
        self._buffer.place(tensor, self._offsets[name])
        ctx.lib.c.ggml_set_input(tensor.ptr)
        return tensor

    def view(self, name: str, n: int) -> NDArray[Any]:
        """The first `n` values of a region, (n,), for writing."""
        return self._views[name][:n]

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return self._buffer.nbytes

    def close(self) -> None:
        """Frees the regions; no view may be used any more."""
        self._views.clear()
        self._buffer.close()
