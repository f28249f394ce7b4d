"""safetensors files: header checked against bounds first, then one tensor at a time.

Format: u64 length of a JSON header, the header (name -> dtype, shape, data_offsets), the data
(https://github.com/huggingface/safetensors). A file is hostile until its header was checked: its
size, its JSON, every shape and every byte range.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import AdapterFormatError, UnsupportedError

MAX_HEADER_BYTES = 64 << 20  # 40,000 tensors of per-expert modules take 6 MB
MAX_TENSORS = 1 << 17  # 94 layers of 128 experts have 72,000
MAX_NAME = 1024  # characters
_MAX_DIMS = 8
_MAX_VALUES = 12 * MAX_TENSORS  # a matrix's entry has 8: commas and brackets that open
_LENGTH_BYTES = 8

_ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_FLOATS: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a training framework's file: where its bytes stand."""

    name: str
    dtype: str  # as the format spells it: F32, F16, BF16, …
    shape: tuple[int, ...]  # numpy order
    path: Path
    offset: int  # bytes from the start of the file
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name; AdapterFormatError for anything that does not add up."""
    size = _file_bytes(path)
    try:
        with path.open("rb") as file:
            head = file.read(_LENGTH_BYTES)
            if head.startswith(b"version "):
                raise AdapterFormatError(
                    "this is a Git-LFS pointer, not the file", path=path, hint="git lfs pull"
                )
            if head.startswith(b"PK\x03\x04"):
                raise AdapterFormatError(
                    "this is a zip archive (PyTorch's own format), not a safetensors file",
                    path=path,
                    hint="save the adapter with safe_serialization=True",
                )
            n = int.from_bytes(head, "little")
            if len(head) < _LENGTH_BYTES or not 2 <= n <= min(size - 8, MAX_HEADER_BYTES):
                raise AdapterFormatError(
                    f"not a safetensors file: expected a header of 2 to "
                    f"{max(0, min(size - 8, MAX_HEADER_BYTES))} bytes, got {n}",
                    path=path,
                )
            text = file.read(n)
    except OSError as exc:
        raise AdapterFormatError(f"failed to read: {exc.strerror}", path=path) from exc
    return _tensors(path, _parse(path, text), _LENGTH_BYTES + n, size)


def read_values(info: StoredTensor) -> NDArray[np.float32]:
    """A tensor's values as f32, its own shape; UnsupportedError for types that are no floats."""
    if info.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{info.path}: {info.name}: expected type {', '.join(_FLOATS)}, got {info.dtype}",
            what=f"adapter tensors of type {info.dtype}",
            hint="save the adapter in float32, float16 or bfloat16",
        )
    try:
        with info.path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.nbytes)
    except OSError as exc:
        raise AdapterFormatError(f"failed to read: {exc.strerror}", path=info.path) from exc
    if len(data) != info.nbytes:
        raise AdapterFormatError(
            f"{info.name}: the file became shorter while it was read", path=info.path
        )
    raw: NDArray[Any] = np.frombuffer(data, _FLOATS[info.dtype])
    if info.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return raw.astype(np.float32).reshape(info.shape)


def _file_bytes(path: Path) -> int:
    try:
        status = path.stat()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise AdapterFormatError(f"failed to open: {reason}", path=path) from exc
    if not stat.S_ISREG(status.st_mode):
        raise AdapterFormatError("expected a regular file", path=path)
    return status.st_size


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    # An object of Python for every two bytes would take twenty times the header's memory.
    n_values = sum(map(text.count, (b",", b"[", b"{")))
    if n_values > _MAX_VALUES:
        raise AdapterFormatError(
            f"expected a header of at most {_MAX_VALUES} values, got {n_values}", path=path
        )
    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        raise AdapterFormatError(f"the header is no JSON: {exc}"[:300], path=path) from exc
    if not isinstance(header, dict):
        raise AdapterFormatError("expected a JSON object as header", path=path)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise AdapterFormatError(
            f"expected at most {MAX_TENSORS} tensors, got {len(header)}", path=path
        )
    return header


def _tensors(
    path: Path, header: Mapping[str, Any], start: int, size: int
) -> dict[str, StoredTensor]:
    found = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    end, before = start, ""
    for info in sorted(found.values(), key=lambda one: (one.offset, one.nbytes)):
        if info.offset < end and info.nbytes:
            raise AdapterFormatError(
                f"tensors '{before}' and '{info.name}' overlap", path=path, where=info.name
            )
        end, before = info.offset + info.nbytes, info.name
    return found


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    def wrong(message: str) -> AdapterFormatError:
        return AdapterFormatError(message, path=path, where=name[:200])

    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise wrong(f"expected a printable name of 1 to {MAX_NAME} characters")
    if not isinstance(entry, dict):
        raise wrong("expected dtype, shape and data_offsets")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise wrong(f"unknown dtype {dtype!r:.40}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise wrong(f"expected a shape of at most {_MAX_DIMS} sizes, got {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise wrong(f"expected two offsets, got {offsets!r:.80}")
    first, last = offsets
    if not first <= last <= size - start:
        raise wrong(
            f"data [{first}, {last}) is not within the file, which holds {size - start} bytes of "
            "data: corrupted or incomplete"
        )
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if last - first != expected:
        raise wrong(f"shape {shape} of {dtype} takes {expected} bytes, got {last - first}")
    return StoredTensor(name, dtype, tuple(shape), path, start + first, expected)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**48 for item in value
    )
