"""What converting needs to know of a base: shapes, heads, layers, and values of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo, base_info_from_gguf
from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import to_f32
from loragraph.model.files import split_paths

Values = NDArray[np.float32]

_GEMMA3_IMAGE_TOKENS = 64
_FOLDED = "prism.hadamard."


@dataclass(frozen=True)
class BaseFacts:
    """A base model as the conversion sees it: its header, and where its weights stand."""

    info: BaseInfo
    n_layer: int
    n_head: tuple[int, ...]  # one value a layer
    n_head_kv: tuple[int, ...]
    names: tuple[str, ...]  # what the file calls itself and what it was made of
    tensors: Mapping[str, TensorInfo]
    lib: Library
    folded: bool = False  # weights were rotated when the file was made

    def rows(self, name: str, ids: Sequence[int] | None = None) -> Values:
        """A weight, or the rows `ids` of it, as f32 (n, n_in); a tied head is the token table."""
        info = self.tensors.get(name)
        if info is None and name == OUTPUT and self.info.tied:
            info = self.tensors[TOKEN_EMBD]
        assert info is not None  # the plan checked it
        if self.folded:
            raise UnsupportedError(
                f"{name}: what was trained whole is compared with the base's weights, and those of "
                "a Hadamard-folded base are rotated",
                what="weights trained whole, for a folded base",
                hint="convert for a base that is not folded",
            )
        n_in, n_rows = info.ne[0], info.n_elements // info.ne[0]
        data = _read_rows(info, n_rows, ids)
        out = np.empty((len(data), n_in), np.float32)
        to_f32(self.lib, info.type, data.reshape(-1), out)
        return out

    def padding(self, target: str, n_rows: int) -> int:
        """Rows by which a trained table or head is longer than the base's, where that is known.

        Gemma 3's checkpoints that can see have 64 rows for image tokens behind the vocabulary,
        which its GGUF files leave out: no text reads them. Any other surplus is another base.
        """
        surplus = n_rows - self.info.targets[target].ne[1]
        known = self.info.arch == "gemma3" and target in (TOKEN_EMBD, OUTPUT)
        return surplus if known and surplus == _GEMMA3_IMAGE_TOKENS else 0


def _read_rows(info: TensorInfo, n_rows: int, ids: Sequence[int] | None) -> NDArray[np.uint8]:
    """Bytes of all rows, or of some, (n, row_bytes) u8."""
    row_bytes = info.nbytes // n_rows
    try:
        with info.path.open("rb") as file:
            if ids is None:
                file.seek(info.offset)
                data = file.read(info.nbytes)
            else:
                parts = []
                for row in ids:
                    file.seek(info.offset + row * row_bytes)
                    parts.append(file.read(row_bytes))
                data = b"".join(parts)
    except OSError as exc:
        raise GGUFError(f"failed to read: {exc.strerror}", path=info.path) from exc
    n = n_rows if ids is None else len(ids)
    if len(data) != n * row_bytes:
        raise GGUFError("the file became shorter while it was read", path=info.path)
    return np.frombuffer(data, np.uint8).reshape(n, row_bytes)


def read_base(lib: Library, path: Path) -> BaseFacts:
    """The base in a GGUF file, or in all files of a split one; headers only."""
    with ExitStack() as stack:
        files = [stack.enter_context(GGUFFile(lib, part)) for part in split_paths(path)]
        first = files[0]
        info = base_info_from_gguf(*files)
        arch = info.arch
        n_layer = first.integer(f"{arch}.block_count", low=1, high=1024)
        n_head = _per_layer(first, f"{arch}.attention.head_count", n_layer, ())
        keys = ("general.name", "general.basename", "general.base_model.0.name", "general.finetune")
        found = [first.scalar(key) for key in keys]
        return BaseFacts(
            info,
            n_layer,
            n_head,
            _per_layer(first, f"{arch}.attention.head_count_kv", n_layer, n_head),
            tuple(str(name) for name in found if isinstance(name, str) and name),
            {name: tensor for file in files for name, tensor in file.tensors.items()},
            lib,
            any(key.startswith(_FOLDED) for key in first),
        )


def _per_layer(file: GGUFFile, key: str, n_layer: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if key not in file and default:
        return default
    if file.type_of(key).startswith("array"):
        values = tuple(int(n) for n in file.numbers(key))
        if len(values) < n_layer:
            raise GGUFError(
                f"expected {n_layer} values, got {len(values)}", path=file.path, where=key
            )
        return values
    return (file.integer(key, low=1, high=1 << 20),) * n_layer
