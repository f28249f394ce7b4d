"""Hadamard-folded weights: the keys `prism.hadamard.*` of a header, checked.

A folded matrix was multiplied by a rotation when the file was made, so that it quantises better:
W' = W S H with signs S on the diagonal and H the normalised Walsh-Hadamard matrix over blocks of
the input. W x = W' (H S x), so the graph rotates the activation. Rows of a latent lookup table
were rotated too; after the lookup they are turned back, S H row. Messages keep llama.cpp's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile, TensorInfo

PREFIX = "prism.hadamard."
INVERSE_KEY = PREFIX + "inverse_weight_names"

_TRANSFORM = "normalized-sylvester-walsh-hadamard"
_AXIS = "input-last-dimension"
_MAX_BLOCK = 8192  # its matrix has 256 MB
_HEAD, _TABLE = "output.weight", "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Fold:
    """Which weights of a model are folded, and by what rotation."""

    block_size: int
    signs: Mapping[int, NDArray[np.float32]] | None  # (width,) of +1 and -1 by width; None: all +1
    folded: frozenset[str]
    latent: frozenset[str]  # lookup tables
    tied_output: bool  # the latent token table is the head too, as a folded matrix

    def signs_of(self, weight: TensorInfo) -> NDArray[np.float32] | None:
        """The signs of a weight's inputs, (n_in,) f32; GGUFError where the header has none."""
        if self.signs is None:
            return None
        if weight.ne[0] not in self.signs:
            raise GGUFError(
                f"prism.hadamard has no sign vector for width {weight.ne[0]}",
                path=weight.path,
                where=weight.name,
            )
        return self.signs[weight.ne[0]]

    def check_width(self, weight: TensorInfo) -> None:
        """GGUFError unless whole blocks make up the weight's inputs."""
        if weight.ne[0] % self.block_size:
            raise GGUFError(
                f"prism.hadamard block size {self.block_size} does not divide input dimension "
                f"{weight.ne[0]}",
                path=weight.path,
                where=weight.name,
            )


def hadamard(n: int) -> NDArray[np.float32]:
    """The normalised Walsh-Hadamard matrix (n, n) f32 in Sylvester's order, n a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    out: NDArray[np.float32] = matrix / np.sqrt(np.float32(n))
    return out


def read_fold(file: GGUFFile) -> Fold | None:
    """The fold of a model, None where its weights are plain.

    Raises GGUFError for a header that contradicts itself, UnsupportedError for what is not known:
    a model that is computed without its rotation gives text without sense.
    """
    if not any(key.startswith(PREFIX) for key in file):
        return None
    version = file.integer(PREFIX + "version", high=2**32 - 1)
    if version not in (1, 2):
        raise _unsupported(file, "version", version)
    for name, known in (("transform", _TRANSFORM), ("axis", _AXIS)):
        got = file.string(PREFIX + name)
        if got != known:
            raise _unsupported(file, name, got)
    if file.boolean(PREFIX + "gdn_v_grouped", default=False):
        raise _unsupported(file, "gdn_v_grouped", True)
    block_size = file.integer(PREFIX + "block_size", high=2**32 - 1)
    if not 2 <= block_size <= _MAX_BLOCK or block_size & (block_size - 1):
        raise _error(
            file, f"expected a power of two from 2 to {_MAX_BLOCK}, got {block_size}", "block_size"
        )
    folded = _names(file, "weight_names")
    latent = _names(file, "inverse_weight_names", optional=True)
    if not folded:
        raise _error(file, "prism.hadamard.weight_names is empty", "weight_names")
    if folded & latent:
        raise _error(file, f"'{min(folded & latent)}' stands among both", "weight_names")
    return Fold(block_size, _signs(file), folded, latent, _tied_output(file, version, latent))


def latent_tables(file: GGUFFile) -> frozenset[str]:
    """The latent lookup tables alone, for those who read no weight."""
    return _names(file, "inverse_weight_names", optional=True)


def _tied_output(file: GGUFFile, version: int, latent: frozenset[str]) -> bool:
    tied = file.boolean(PREFIX + "tied_output", default=False)
    if tied != (version == 2):
        raise _error(
            file,
            "prism.hadamard version 2 requires tied_output=true; version 1 forbids it: "
            f"got version {version} and {str(tied).lower()}",
            "tied_output",
        )
    if tied and _HEAD in file.tensors:
        raise _error(
            file, "prism.hadamard.tied_output requires output.weight to be absent", "tied_output"
        )
    if tied and _TABLE not in latent:
        raise _error(
            file, "prism.hadamard.tied_output requires a latent token embedding", "tied_output"
        )
    return tied


def _signs(file: GGUFFile) -> Mapping[int, NDArray[np.float32]] | None:
    mode = file.string(PREFIX + "sign_mode")
    if mode == "identity":
        return None
    if mode != "explicit":
        raise _unsupported(file, "sign_mode", mode)
    widths = _integers(file, "sign_widths")
    if not len(widths):
        raise _error(file, "sign_mode is explicit but sign_widths is empty", "sign_widths")
    if len(set(widths.tolist())) < len(widths) or widths.min() < 1:
        raise _error(file, f"expected widths, each once, got {widths.tolist()}", "sign_widths")
    values = _integers(file, "sign_values")
    if len(values) != sum(widths.tolist()):
        raise _error(
            file,
            f"sign_values length mismatch: expected {sum(widths.tolist())}, got {len(values)}",
            "sign_values",
        )
    if not np.isin(values, (-1, 1)).all():
        raise _error(file, "prism.hadamard sign values must be +/-1", "sign_values")
    ends = np.cumsum(widths)[:-1]
    parts = np.split(values.astype(np.float32), ends)
    return dict(zip(widths.tolist(), parts, strict=True))


def _integers(file: GGUFFile, name: str) -> NDArray[np.int64]:
    values = file.numbers(PREFIX + name)
    if values.dtype.kind not in "iu":
        raise _error(file, f"expected integers, got {file.type_of(PREFIX + name)}", name)
    return values.astype(np.int64)


def _names(file: GGUFFile, name: str, *, optional: bool = False) -> frozenset[str]:
    key = PREFIX + name
    if optional and key not in file:
        return frozenset()
    packed = file.strings(key).data.tobytes().split(b"\0")[:-1]
    names = [one.decode("utf-8", "replace") for one in packed]
    if len(set(names)) < len(names):
        twice = next(one for i, one in enumerate(names) if one in names[:i])
        raise _error(file, f"duplicate prism.hadamard weight: {twice}", name)
    return frozenset(names)


def _error(file: GGUFFile, message: str, name: str) -> GGUFError:
    return GGUFError(message, path=file.path, where=PREFIX + name)


def _unsupported(file: GGUFFile, name: str, got: object) -> UnsupportedError:
    return UnsupportedError(
        f"{file.path}: unsupported {PREFIX}{name}: {got}", what=f"{PREFIX}{name} {got}"
    )
