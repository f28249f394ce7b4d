"""The K and V tensors: one cell holds one token's K and V of every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.handles import Buffer, Tensor, TensorContext
from loragraph.ggml.lib import Library
from loragraph.model.hparams import HParams

_ALIGNMENT = 64  # of each tensor's cells


@dataclass(frozen=True, slots=True)
class CellFormat:
    """What the bytes of a cell mean: K and V of each layer in turn."""

    kv_type: int  # ggml type number
    v_transposed: bool
    bytes_per_cell: int
    long_context: bool = False  # K was turned with longrope's factors for long contexts


class KvCache:
    """Unified cells: any sequence may use any cell; who sits where is decided elsewhere.

    K of a layer is [n_embd_k, n_cells]. V is [n_embd_v, n_cells] or, for plain attention, turned
    over: [n_cells, n_embd_v], so that a product over cells reads whole rows. Where `v_in_k`, V is
    the first values of K and has no tensors.
    """

    def __init__(
        self,
        lib: Library,
        hparams: HParams,
        n_cells: int,
        type_: int,
        *,
        v_transposed: bool,
        long_context: bool = False,
    ) -> None:
        """`long_context` says how K will have been turned; it is kept for `cell_format` alone."""
        self._lib = lib
        self.n_cells = n_cells
        self.type = type_
        self.v_transposed = v_transposed
        self.long_context = long_context
        self.v_in_k = hparams.v_in_k
        self._ctx = TensorContext(lib, 2 * hparams.n_layer)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for il in range(hparams.n_layer):
            n_k, n_v = hparams.n_embd_k(il), hparams.n_embd_v(il)
            v_ne = (n_cells, n_v) if v_transposed else (n_v, n_cells)
            self.k.append(self._ctx.new_tensor(type_, (n_k, n_cells), f"cache_k_l{il}"))
            if not self.v_in_k:
                self.v.append(self._ctx.new_tensor(type_, v_ne, f"cache_v_l{il}"))
        tensors = (*self.k, *self.v)
        try:
            # Zeroed: a masked cell still meets the product, and 0 * NaN would spoil it.
            self._buffer = Buffer.zeroed(lib, sum(map(self._room, tensors)))
        except BaseException:
            self._ctx.close()
            raise
        offset = 0
        for tensor in tensors:
            self._buffer.place(tensor, offset)
            offset += self._room(tensor)

    def clear_from(self, first: int) -> None:
        """Zeroes the cells [first, n_cells) of every layer."""
        self.zero(np.arange(first, self.n_cells))

    def zero(self, cells: NDArray[np.int64]) -> None:
        """Zeroes these cells, (n,) i64, of every layer."""
        for k in self.k:
            self._bytes(k).reshape(self.n_cells, -1)[cells] = 0
        for v in self.v:
            values = self._bytes(v)
            if self.v_transposed:
                values.reshape(v.ne[1], self.n_cells, -1)[:, cells] = 0
            else:
                values.reshape(self.n_cells, -1)[cells] = 0

    @property
    def cell_format(self) -> CellFormat:
        """The format of a row of `read`."""
        n_bytes = sum(len(self._bytes(part)) for part in (*self.k, *self.v))
        n_bytes //= self.n_cells
        return CellFormat(self.type, self.v_transposed, n_bytes, self.long_context)

    def read(self, cells: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Bytes of these cells, (n,) i64: (n, bytes_per_cell), K and V of each layer in turn."""
        parts = [part[:, cells].swapaxes(0, 1).reshape(len(cells), -1) for part in self._parts()]
        return np.concatenate(parts, axis=1)

    def write(self, cells: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Fills these cells with what `read` gave."""
        at = 0
        for part in self._parts():
            n_groups, _, n_bytes = part.shape
            width = n_groups * n_bytes
            values = rows[:, at : at + width].reshape(len(cells), n_groups, n_bytes)
            part[:, cells] = values.swapaxes(0, 1)
            at += width

    def _parts(self) -> Iterator[NDArray[np.uint8]]:
        """K and V of each layer as (groups, n_cells, bytes): one group, or one a value of V."""
        for il, k in enumerate(self.k):
            yield self._bytes(k).reshape(1, self.n_cells, -1)
            if not self.v_in_k:
                v = self.v[il]
                n_groups = v.ne[1] if self.v_transposed else 1
                yield self._bytes(v).reshape(n_groups, self.n_cells, -1)

    @staticmethod
    def bytes_for(lib: Library, hparams: HParams, n_cells: int, type_: int) -> int:
        """Bytes of `n_cells` cells of a ggml type."""
        both = (hparams.n_embd_k, hparams.n_embd_v)
        widths = (width(il) for il in range(hparams.n_layer) for width in both)
        return sum(n_cells * int(lib.c.ggml_row_size(type_, width)) for width in widths)

    def _room(self, tensor: Tensor) -> int:
        """Bytes of a tensor, rounded up so that the next one is aligned."""
        n_bytes = int(self._lib.c.ggml_nbytes(tensor.ptr))
        return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return self._buffer.nbytes

    def _bytes(self, tensor: Tensor) -> NDArray[np.uint8]:
        """A tensor's memory; zero bytes are zeros in every type."""
        n_bytes = int(self._lib.c.ggml_nbytes(tensor.ptr))
        return np.frombuffer(self._lib.ffi.buffer(tensor.ptr.data, n_bytes), np.uint8)

    def close(self) -> None:
        """Frees the cells."""
        self._buffer.close()
        self._ctx.close()
