"""An adapter as plain arrays, and reading GGUF tensors as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize, quant_shape_to_byte_shape


@dataclass(frozen=True)
class AdapterArrays:
    """Pairs (lora_a, lora_b) by base name: a (rank, n_in), b (n_out, rank) f32, of experts stacks.

    For token_embd.weight: a (n_vocab, rank), b (n_embd, rank).
    """

    alpha: float  # 0 = none
    pairs: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]

    def scale(self, name: str, user_scale: float) -> float:
        """user_scale * alpha / rank, rank from b's ne[0]; without alpha the user's scale alone."""
        rank = self.pairs[name][1].shape[-1]
        return user_scale * self.alpha / rank if self.alpha else user_scale

    def delta(self, name: str, user_scale: float = 1.0) -> npt.NDArray[np.float64]:
        """What the adapter adds to the base matrix (n_out, n_in), lookup included."""
        a, b = (half.astype(np.float64) for half in self.pairs[name])
        product = a @ b.T if name == "token_embd.weight" else b @ a
        return self.scale(name, user_scale) * product


def dequantised(
    data: bytes, shape: tuple[int, ...], type: GGMLQuantizationType
) -> npt.NDArray[np.float32]:
    """The f32 values (numpy order) of a tensor's bytes."""
    if type == GGMLQuantizationType.F32:
        return np.frombuffer(data, np.float32).reshape(shape).copy()
    if type == GGMLQuantizationType.F16:
        return np.frombuffer(data, np.float16).reshape(shape).astype(np.float32)
    rows = np.frombuffer(data, np.uint8).reshape(quant_shape_to_byte_shape(shape, type))
    return np.asarray(dequantize(rows, type), dtype=np.float32).reshape(shape)


def read_tensors(*paths: str | Path) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors of the files (the parts of one split model) as f32, numpy order."""
    return {item.name: _values(item) for path in paths for item in GGUFReader(path, "r").tensors}


def _values(item: ReaderTensor) -> npt.NDArray[np.float32]:
    shape = tuple(int(n) for n in reversed(item.shape))
    return dequantised(item.data.tobytes(), shape, item.tensor_type)


def read_metadata(path: str | Path) -> dict[str, object]:
    """All metadata of a file, by key."""
    reader = GGUFReader(path, "r")
    return {key: item.contents() for key, item in reader.fields.items()}


def read_adapter(path: str | Path) -> AdapterArrays:
    """Read a well-formed adapter file."""
    tensors = read_tensors(path)
    names = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
    pairs = {name: (tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]) for name in names}
    alpha = read_metadata(path).get("adapter.lora.alpha", 0.0)
    assert isinstance(alpha, float)
    return AdapterArrays(alpha=alpha, pairs=pairs)
