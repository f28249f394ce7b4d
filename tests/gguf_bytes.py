"""GGUF files as bytes: metadata and tensors in, one file's bytes out.

Unlike gguf.GGUFWriter it writes what it is told, so wrong files come out too: repeated names,
wrong counts, offsets outside the file, any value type. Constants and most quantisers are the gguf
package's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import quantize

Array: TypeAlias = npt.NDArray[np.float32]
Scalar: TypeAlias = str | bool | int | float | np.generic
Value: TypeAlias = (
    Scalar | Sequence[str] | Sequence[int] | Sequence[float] | npt.NDArray[np.generic]
)
Metadata: TypeAlias = Mapping[str, Value] | Sequence[tuple[str, Value]]

_SCALAR_FORMATS = {
    np.dtype(np.uint8): (GGUFValueType.UINT8, "B"),
    np.dtype(np.int8): (GGUFValueType.INT8, "b"),
    np.dtype(np.uint16): (GGUFValueType.UINT16, "H"),
    np.dtype(np.int16): (GGUFValueType.INT16, "h"),
    np.dtype(np.uint32): (GGUFValueType.UINT32, "I"),
    np.dtype(np.int32): (GGUFValueType.INT32, "i"),
    np.dtype(np.float32): (GGUFValueType.FLOAT32, "f"),
    np.dtype(np.bool_): (GGUFValueType.BOOL, "?"),
    np.dtype(np.uint64): (GGUFValueType.UINT64, "Q"),
    np.dtype(np.int64): (GGUFValueType.INT64, "q"),
    np.dtype(np.float64): (GGUFValueType.FLOAT64, "d"),
}


@dataclass(frozen=True)
class RawTensor:
    """One tensor as it shall stand in the file, right or wrong."""

    name: str
    shape: tuple[int, ...]  # numpy order; the file holds it reversed
    type: int  # a ggml type number, known or not
    data: bytes
    offset: int | None = None  # overrides the offset in the data section


def tensor(
    name: str, array: npt.ArrayLike, type: GGMLQuantizationType = GGMLQuantizationType.F32
) -> RawTensor:
    """A well-formed tensor: `array` (any shape) converted to a ggml type."""
    values = np.ascontiguousarray(array, dtype=np.float32)
    return RawTensor(name, values.shape, type, quantised(values, type))


def quantised(values: Array, type: GGMLQuantizationType) -> bytes:
    """`values` in a ggml type; rows (the last axis) must be multiples of the type's block."""
    block, _ = GGML_QUANT_SIZES[type]
    if values.shape and values.shape[-1] % block:
        raise ValueError(f"{type.name} needs rows of a multiple of {block}, got {values.shape}")
    try:
        return quantize(values, type).tobytes()
    except NotImplementedError:
        return _quantised_by_ggml(values, type)


def _quantised_by_ggml(values: Array, type: GGMLQuantizationType) -> bytes:
    block, block_bytes = GGML_QUANT_SIZES[type]
    out = ctypes.create_string_buffer(values.size // block * block_bytes)
    n_cols = values.shape[-1]
    # The importance matrix is required by the types below three bits and ignored when all ones.
    importance = np.ones(n_cols, dtype=np.float32)
    source = np.ascontiguousarray(values, dtype=np.float32)
    n_written = _ggml_base().ggml_quantize_chunk(
        int(type),
        source.ctypes.data,
        ctypes.addressof(out),
        0,
        values.size // n_cols,
        n_cols,
        importance.ctypes.data,
    )
    if n_written != len(out):
        raise ValueError(f"ggml wrote {n_written} bytes of {type.name}, expected {len(out)}")
    return out.raw


@cache
def _ggml_base() -> ctypes.CDLL:
    # find_spec does not run the package's slow __init__.
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama_cpp is not installed")
    folder = Path(spec.origin).parent / "lib"
    library = ctypes.CDLL(str(next(iter(sorted(folder.glob("libggml-base.*"))))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


def gguf_bytes(
    metadata: Metadata,
    tensors: Sequence[RawTensor],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """The bytes of one GGUF file.

    Python ints become u32 (negative: i32), floats f32; numpy scalars and arrays keep their type.
    `n_kv` and `n_tensors` override the counts of the header. `alignment` is used as given:
    write the key general.alignment too when it is not 32.
    """
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_kv is None else n_kv,
    )
    head += b"".join(_string(key) + _typed_value(value) for key, value in pairs)
    data, n_bytes = [], 0
    for item in tensors:
        offset = n_bytes if item.offset is None else item.offset
        head += _string(item.name) + struct.pack("<I", len(item.shape))
        head += struct.pack(f"<{len(item.shape)}Q", *reversed(item.shape))
        head += struct.pack("<IQ", item.type, offset)
        data.append(_padded(item.data, alignment))
        n_bytes += len(data[-1])
    return _padded(head, alignment) + b"".join(data)


def _padded(data: bytes, alignment: int) -> bytes:
    n_missing = -len(data) % alignment
    return data + bytes(n_missing) if n_missing else data


def _string(text: str) -> bytes:
    # surrogateescape lets tests write names that are no UTF-8.
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _typed_value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind, _ = _SCALAR_FORMATS[value.dtype]
        head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, value.size)
        return head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, Sequence):
        if all(isinstance(item, str) for item in value):
            head = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value))
            return head + b"".join(_string(str(item)) for item in value)
        is_float = any(isinstance(item, float) for item in value)
        return _typed_value(np.asarray(value, dtype=np.float32 if is_float else np.int32))
    scalar = value if isinstance(value, np.generic) else _numpy_scalar(value)
    kind, letter = _SCALAR_FORMATS[scalar.dtype]
    return struct.pack("<I", kind) + struct.pack(f"<{letter}", scalar.item())


def _numpy_scalar(value: bool | int | float) -> np.generic:
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    return np.uint32(value) if value >= 0 else np.int32(value)


def write_gguf(path: str | Path, metadata: Metadata, tensors: Sequence[RawTensor]) -> Path:
    """Write one GGUF file, right or wrong, as told."""
    Path(path).write_bytes(gguf_bytes(metadata, tensors))
    return Path(path)
