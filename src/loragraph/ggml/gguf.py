"""GGUF files read through ggml's own parser: metadata and tensor infos, every access checked.

The parser takes milliseconds where a parser in Python takes seconds, but its typed getters abort
the process on a wrong type: so a key's type is looked at before its value, here and nowhere else.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import GGUFError, LifecycleError
from loragraph.ggml.lib import Library
from loragraph.kernels.strings import PackedStrings

Scalar = int | float | bool | str
T = TypeVar("T", str, bool, int, float)

_SCALARS: Mapping[int, tuple[str, str]] = {  # GGUF value type -> name, numpy dtype
    0: ("u8", "u1"),
    1: ("i8", "i1"),
    2: ("u16", "<u2"),
    3: ("i16", "<i2"),
    4: ("u32", "<u4"),
    5: ("i32", "<i4"),
    6: ("f32", "<f4"),
    7: ("bool", "?"),
    10: ("u64", "<u8"),
    11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {code: name for code, (name, _) in _SCALARS.items()} | {8: "string", 9: "array"}
_PATH = "check the path, and that the file may be read"
_MIN_BYTES = 24  # magic, version, two counts
_HEADER_BYTES = (4 << 20, 16 << 20, 64 << 20)
"""The parser is given this much of the file, then this much, and so on. A wrong count makes it
allocate up to 16 times the bytes it was given, and read them one value at a time: the limit bounds
both. A vocabulary of 49,000 tokens with its merges takes 2 MB."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's data stands in its file."""

    name: str
    type: int  # ggml type number
    ne: tuple[int, int, int, int]
    offset: int  # bytes from the start of the file
    nbytes: int
    path: Path

    @property
    def n_elements(self) -> int:
        """Number of values."""
        return math.prod(self.ne)


class GGUFFile:
    """An open GGUF file: metadata by key, tensor infos by name; close() frees the C parser's state.

    Tensor bounds are checked on opening: every [offset, offset + nbytes) lies inside the file.
    """

    def __init__(self, lib: Library, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.file_bytes = _regular_file_bytes(self.path)
        self._lib = lib
        self._ctx: Any = _parse(lib, self.path)
        try:
            self._keys = self._index_keys()
            self.tensors = self._index_tensors()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the parser's state; tensor infos stay usable. A second call does nothing."""
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            self._lib.c.gguf_free(ctx)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def type_of(self, key: str) -> str:
        """The name of a key's type: "u32", "string", "array of f32", …; "" where it is missing."""
        if key not in self._keys:
            return ""
        key_id, kind = self._keys[key]
        if kind != _ARRAY:
            return _TYPE_NAMES[kind]
        return f"array of {_TYPE_NAMES[self._lib.c.gguf_get_arr_type(self._open, key_id)]}"

    def scalar(self, key: str) -> Scalar | None:
        """The value of a key that is no array; None where it is missing or an array."""
        if key not in self._keys:
            return None
        key_id, kind = self._keys[key]
        if kind == _STRING:
            return self._lib.text(self._lib.c.gguf_get_val_str(self._open, key_id))
        if kind == _ARRAY:
            return None
        dtype = np.dtype(_SCALARS[kind][1])
        data = self._lib.c.gguf_get_val_data(self._open, key_id)
        value = np.frombuffer(self._lib.ffi.buffer(data, dtype.itemsize), dtype)[0]
        return value.item()  # type: ignore[no-any-return]

    def string(self, key: str, default: str | None = None) -> str:
        """The string under `key`; GGUFError where it is missing without default or no string."""
        return self._typed(key, default, str, "string")

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """The bool under `key`."""
        return self._typed(key, default, bool, "bool")

    def integer(
        self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1
    ) -> int:
        """The integer of any width under `key`, inside [low, high]."""
        value = self._typed(key, default, int, "integer")
        if not low <= value <= high:
            raise self._error(f"expected a value from {low} to {high}, got {value}", key)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """The finite f32 or f64 under `key`."""
        value = self._typed(key, default, float, "f32")
        if not math.isfinite(value):
            raise self._error(f"expected a finite number, got {value}", key)
        return value

    def array_length(self, key: str) -> int:
        """Number of values of the array under `key`."""
        return int(self._lib.c.gguf_get_arr_n(self._open, self._array(key)))

    def numbers(self, key: str) -> NDArray[Any]:
        """The array of numbers or bools under `key`, (n,) in its own dtype, a copy."""
        key_id = self._array(key)
        kind = self._lib.c.gguf_get_arr_type(self._open, key_id)
        if kind not in _SCALARS:
            raise self._error(f"expected an array of numbers, got {self.type_of(key)}", key)
        dtype = np.dtype(_SCALARS[kind][1])
        n = self.array_length(key)
        if n == 0:
            return np.empty(0, dtype)
        data = self._lib.c.gguf_get_arr_data(self._open, key_id)
        return np.frombuffer(self._lib.ffi.buffer(data, n * dtype.itemsize), dtype).copy()

    def strings(self, key: str) -> PackedStrings:
        """The array of strings under `key` as bytes, each cut at its first NUL as C sees it."""
        key_id = self._array(key)
        if self._lib.c.gguf_get_arr_type(self._open, key_id) != _STRING:
            raise self._error(f"expected an array of strings, got {self.type_of(key)}", key)
        getter = self._lib.ffi.addressof(self._lib.c, "gguf_get_arr_str")
        address = self._lib.address
        return PackedStrings.read(
            address(getter), address(self._open), key_id, self.array_length(key)
        )

    def scalars(self) -> dict[str, Scalar]:
        """All values that are no arrays, by key."""
        values = ((key, self.scalar(key)) for key in self._keys)
        return {key: value for key, value in values if value is not None}

    def arrays(self, most: int) -> dict[str, tuple[Scalar, ...]]:
        """All arrays of at most `most` values, by key; text that is no UTF-8 is replaced."""
        found: dict[str, tuple[Scalar, ...]] = {}
        for key, (_, kind) in self._keys.items():
            if kind != _ARRAY or self.array_length(key) > most:
                continue
            if self.type_of(key) == "array of string":
                texts = self.strings(key).to_list()
                found[key] = tuple(text.decode("utf-8", "replace") for text in texts)
            else:
                found[key] = tuple(self.numbers(key).tolist())
        return found

    @property
    def version(self) -> int:
        """The version of the GGUF format that the file states."""
        return int(self._lib.c.gguf_get_version(self._open))

    @property
    def alignment(self) -> int:
        """Bytes to which each tensor's place is aligned (`general.alignment`)."""
        return int(self._lib.c.gguf_get_alignment(self._open))

    @property
    def data_offset(self) -> int:
        """Bytes from the start of the file to the data section; the header lies before it."""
        return int(self._lib.c.gguf_get_data_offset(self._open))

    @property
    def _open(self) -> Any:
        if self._ctx is None:
            raise LifecycleError(f"{self.path} was closed")
        return self._ctx

    def _typed(self, key: str, default: T | None, kind: type[T], name: str) -> T:
        if key not in self._keys:
            if default is None:
                raise self._error(f"expected a key of type {name}, got none", key)
            return default
        value = self.scalar(key)
        if type(value) is not kind:
            raise self._error(f"expected type {name}, got {self.type_of(key)}", key)
        return value

    def _array(self, key: str) -> int:
        if key not in self._keys:
            raise self._error("expected an array, got none", key)
        key_id, kind = self._keys[key]
        if kind != _ARRAY:
            raise self._error(f"expected an array, got {self.type_of(key)}", key)
        return key_id

    def _error(self, message: str, where: str) -> GGUFError:
        return GGUFError(message, path=self.path, where=where)

    def _index_keys(self) -> dict[str, tuple[int, int]]:
        c, ctx = self._lib.c, self._ctx
        n_kv = c.gguf_get_n_kv(ctx)
        keys = {
            self._lib.text(c.gguf_get_key(ctx, i)): (i, int(c.gguf_get_kv_type(ctx, i)))
            for i in range(n_kv)
        }
        if len(keys) != n_kv:  # the parser tells apart what stands behind a NUL
            raise self._error(f"expected {n_kv} distinct keys, got {len(keys)}", "metadata")
        return keys

    def _index_tensors(self) -> dict[str, TensorInfo]:
        c, ctx = self._lib.c, self._ctx
        start = int(c.gguf_get_data_offset(ctx))
        tensors: dict[str, TensorInfo] = {}
        for i in range(c.gguf_get_n_tensors(ctx)):
            name = self._lib.text(c.gguf_get_tensor_name(ctx, i))
            info = TensorInfo(
                name=name,
                type=int(c.gguf_get_tensor_type(ctx, i)),
                ne=tuple(self._lib.ffi.unpack(c.gguf_get_tensor_ne(ctx, i), 4)),
                offset=start + int(c.gguf_get_tensor_offset(ctx, i)),
                nbytes=int(c.gguf_get_tensor_size(ctx, i)),
                path=self.path,
            )
            if name in tensors:
                raise self._error("duplicate tensor name", name)
            if min(info.ne) < 1:
                raise self._error(f"expected sizes of at least 1, got {list(info.ne)}", name)
            if info.offset + info.nbytes > self.file_bytes:
                raise self._error(
                    f"tensor '{name}' data is not within the file bounds, file is corrupted or "
                    f"incomplete: expected at least {info.offset + info.nbytes} bytes, got "
                    f"{self.file_bytes}",
                    name,
                )
            tensors[name] = info
        return tensors


def _regular_file_bytes(path: Path) -> int:
    try:
        status = path.stat()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise GGUFError(f"failed to open: {reason}", path=path, hint=_PATH) from exc
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError("expected a regular file", path=path, hint=_PATH)
    if status.st_size < _MIN_BYTES:
        raise GGUFError(
            f"expected at least {_MIN_BYTES} bytes of GGUF header, got {status.st_size}", path=path
        )
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as exc:
        raise GGUFError(f"failed to open: {exc.strerror}", path=path, hint=_PATH) from exc
    magic = head[:4]
    if magic == b"vers" and head.startswith(b"version https://git-lfs"):
        raise GGUFError("this is a Git-LFS pointer, not the file", path=path, hint="git lfs pull")
    if magic != b"GGUF":
        raise GGUFError(
            f"expected the magic b'GGUF', got {magic!r}",
            path=path,
            hint="loragraph reads GGUF files; loragraph convert makes one of a PEFT adapter",
        )
    return status.st_size


def _parse(lib: Library, path: Path) -> Any:
    params = lib.ffi.new("struct gguf_init_params *", [True, lib.ffi.NULL])
    reason = "unreadable"
    for limit in _HEADER_BYTES:
        try:
            with path.open("rb") as file:
                head = file.read(min(limit, path.stat().st_size))
        except OSError as exc:
            raise GGUFError(f"failed to read: {exc.strerror}", path=path) from exc
        with lib.log_lines() as lines:
            ctx = lib.c.gguf_init_from_buffer(lib.ffi.from_buffer(head), len(head), params[0])
        if ctx != lib.ffi.NULL:
            return ctx
        reason = "; ".join(line.split(": ", 1)[-1] for line in lines) or reason
        if len(head) < limit:
            break
    raise GGUFError(f"not a readable GGUF file: {reason}", path=path)
