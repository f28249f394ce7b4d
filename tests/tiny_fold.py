"""Tiny models with Hadamard-folded weights: a plain model, and the same function folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.gguf_bytes import RawTensor, Value, tensor, write_gguf
from tests.reference.adapter import dequantised
from tests.tiny import TinyModel

TABLE = "token_embd.weight"


def hadamard(n: int) -> npt.NDArray[np.float64]:
    """The normalised matrix by its definition: (-1)^(bits that i and j share) / sqrt(n)."""
    i = np.arange(n)
    shared = np.array([[(a & b).bit_count() for a in i.tolist()] for b in i.tolist()])
    out: npt.NDArray[np.float64] = (-1.0) ** shared / np.sqrt(n)
    return out


@dataclass(frozen=True)
class Folding:
    """How a model is folded, and what its header says of it."""

    block_size: int = 32
    explicit: bool = True  # signs of both values; else all +1
    latent: bool = False  # the token table too
    tied: bool = False  # version 2: the latent table is the head
    plain: Sequence[str] = ()  # endings of matrices that stay as they are
    keys: Mapping[str, Value | None] = field(default_factory=dict)  # changed keys; None: missing
    seed: int = 5

    def signs(self, width: int) -> npt.NDArray[np.float64]:
        """The signs of inputs of this width."""
        if not self.explicit:
            return np.ones(width)
        return np.random.default_rng([self.seed, width]).choice([-1.0, 1.0], width)

    def rotate(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """W S H of rows (..., n_in): what meets H S x as the plain rows meet x."""
        width = rows.shape[-1]
        blocks = (rows * self.signs(width)).reshape(*rows.shape[:-1], -1, self.block_size)
        out: npt.NDArray[np.float64] = blocks @ hadamard(self.block_size)
        return out.reshape(rows.shape)

    def names(self, model: TinyModel) -> list[str]:
        """Matrices that are folded, the latent table not among them."""
        return [
            name
            for name in model.matrices()
            if name != TABLE and not name.endswith(tuple(self.plain) or "\0")
        ]

    def metadata(self, model: TinyModel) -> dict[str, Value]:
        """The keys `prism.hadamard.*`."""
        names = self.names(model)
        widths = sorted({model.matrices()[name][-1] for name in [*names, TABLE]})
        keys: dict[str, Value | None] = {
            "version": np.uint32(2 if self.tied else 1),
            "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension",
            "block_size": np.uint32(self.block_size),
            "sign_mode": "explicit" if self.explicit else "identity",
            "weight_names": names,
        }
        if self.explicit:
            values = np.concatenate([self.signs(width) for width in widths])
            keys["sign_widths"] = np.array(widths, np.int32)
            keys["sign_values"] = values.astype(np.int32)
        if self.latent or self.tied:
            keys["inverse_weight_names"] = [TABLE]
        if self.tied:
            keys["tied_output"] = True
        keys |= self.keys
        return {f"prism.hadamard.{k}": v for k, v in keys.items() if v is not None}


def write_folded(model: TinyModel, folding: Folding, path: Path) -> Path:
    """The model's function as a file of folded weights."""
    keys = model.metadata() | folding.metadata(model)
    return write_gguf(path, keys, folded_tensors(model, folding))


def folded_tensors(model: TinyModel, folding: Folding) -> list[RawTensor]:
    """The model's tensors, folded where the folding says so."""
    folded = set(folding.names(model))
    if folding.latent or folding.tied:
        folded.add(TABLE)
    tensors = []
    for raw in model.raw_tensors():
        if raw.name not in folded:
            tensors.append(raw)
            continue
        values = dequantised(raw.data, raw.shape, model._type(raw.name)).astype(np.float64)
        rotated = folding.rotate(values.reshape(raw.shape))
        tensors.append(tensor(raw.name, rotated.astype(np.float32), model._type(raw.name)))
    return tensors
