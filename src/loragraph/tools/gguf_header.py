"""The header of a GGUF file as bytes: keys copied as they stand, keys added, tensor infos written.

For tools that write a file which differs from another in a few places only. Files are read through
`GGUFFile` first, so what is walked here has been parsed by ggml already.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import GGUFError
from loragraph.ggml.gguf import GGUFFile
from loragraph.kernels.strings import skip_strings

Value = str | bool | int | float | Sequence[str] | NDArray[np.generic]

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ARRAY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7}
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class RawHeader:
    """Keys of a file as bytes (value type and value), and the sizes of its tensors as written."""

    version: int
    alignment: int
    keys: Mapping[str, bytes]  # in the file's order
    sizes: Mapping[str, tuple[int, ...]]  # ggml order, as many as the file states


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor of a file to be written."""

    name: str
    ne: tuple[int, ...]  # ggml order
    type: int
    nbytes: int


def read_header(file: GGUFFile) -> RawHeader:
    """Walks the header of an open file; GGUFError where the file changed meanwhile."""
    try:
        with file.path.open("rb") as opened:
            data = opened.read(file.data_offset)
    except OSError as exc:
        raise GGUFError(f"failed to read: {exc.strerror or exc}", path=file.path) from exc
    try:
        walk = _Walk(data)
        keys = {walk.text(): walk.value() for _ in range(walk.n_keys)}
        sizes = dict(walk.tensor() for _ in range(walk.n_tensors))
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise GGUFError("the header changed while it was read", path=file.path) from exc
    if set(keys) != set(file) or set(sizes) != set(file.tensors):
        raise GGUFError("the header changed while it was read", path=file.path)
    return RawHeader(file.version, file.alignment, keys, sizes)


class _Walk:
    """A position in a header's bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        _, self.n_tensors, self.n_keys = struct.unpack_from("<IQQ", data, 4)
        self._at = 24

    def text(self) -> str:
        """A string; what is no UTF-8 is replaced, as `GGUFFile` does."""
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start, self._at = self._at + 8, self._at + 8 + length
        if self._at > len(self._data):
            raise IndexError("a string reaches behind the header")
        # What stands behind a NUL is not seen by the C parser.
        return self._data[start : self._at].split(b"\0")[0].decode("utf-8", "replace")

    def value(self) -> bytes:
        """The bytes of a value with its type in front."""
        start = self._at
        (kind,) = struct.unpack_from("<I", self._data, start)
        self._at += 4
        if kind == _ARRAY:
            kind, count = struct.unpack_from("<IQ", self._data, self._at)
            self._at += 12
        else:
            count = 1
        if kind == _STRING:
            self._at = skip_strings(self._data, self._at, count)
        else:
            self._at += count * _SIZES.get(kind, len(self._data))
        if self._at > len(self._data):
            raise IndexError("a value reaches behind the header")
        return self._data[start : self._at]

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        """Name and sizes of the next tensor info."""
        name = self.text()
        (n_dims,) = struct.unpack_from("<I", self._data, self._at)
        ne = struct.unpack_from(f"<{min(n_dims, 4)}Q", self._data, self._at + 4)
        self._at += 4 + 8 * n_dims + 12
        return name, ne


def value_bytes(value: Value) -> bytes:
    """A value with its type: str, bool, int (u32), float (f32), strings, or a numpy array."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, np.ndarray):
        kind = _ARRAY_TYPES[value.dtype.str[1:]]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + value.tobytes()
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
    return head + b"".join(_text(item) for item in value)


def integer_bytes(value: int, bits: int, *, signed: bool = False) -> bytes:
    """An integer of 16 or 32 bits with its type."""
    kind, letter = {
        (16, False): (2, "H"),
        (16, True): (3, "h"),
        (32, False): (4, "I"),
        (32, True): (5, "i"),
    }[bits, signed]
    return struct.pack(f"<I{letter}", kind, value)


def header_bytes(
    keys: Mapping[str, bytes],
    tensors: Sequence[OutTensor],
    *,
    version: int = 3,
    alignment: int = DEFAULT_ALIGNMENT,
) -> bytes:
    """Everything before the data section, padded; tensors follow each other, each padded."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(keys))]
    parts += [_text(key) + value for key, value in keys.items()]
    offset = 0
    for tensor in tensors:
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(tensor.ne)}QI", len(tensor.ne), *tensor.ne, tensor.type))
        parts.append(struct.pack("<Q", offset))
        offset += aligned(tensor.nbytes, alignment)
    head = b"".join(parts)
    return head + bytes(aligned(len(head), alignment) - len(head))


def offsets(tensors: Iterable[OutTensor], start: int, alignment: int) -> tuple[list[int], int]:
    """Place of each tensor's bytes in the file whose data section begins at `start`, and its end.

    The end is padded too, as ggml's own writer pads it.
    """
    places = []
    for tensor in tensors:
        places.append(start)
        start += aligned(tensor.nbytes, alignment)
    return places, start


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def same_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file; False where either does not exist."""
    try:
        return path.samefile(other)
    except OSError:
        return False
