"""PyTorch's own format (.bin): read by torch alone, and only with weights_only.

A pickle can run any program, so nothing here unpickles; torch's restricted reader does, where torch
is installed. loragraph does not depend on it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.convert.safetensors import MAX_NAME, MAX_TENSORS, StoredTensor
from loragraph.errors import AdapterFormatError, UnsupportedError

_MAX_RATIO = 4  # an archive of weights is stored, not compressed
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class PickledTensors:
    """The tensors of a .bin file, all in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_archive(path)
        self._tensors = _load(path)
        self.infos = {
            name: StoredTensor(
                name,
                _DTYPES.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype)),
                tuple(tensor.shape),
                path,
                0,
                int(tensor.numel() * tensor.element_size()),
            )
            for name, tensor in self._tensors.items()
        }

    def values(self, name: str) -> NDArray[np.float32]:
        """A tensor's values as f32."""
        if self.infos[name].dtype not in _DTYPES.values():
            raise UnsupportedError(
                f"{self.path}: {name}: expected floats, got {self.infos[name].dtype}",
                what=f"adapter tensors of type {self.infos[name].dtype}",
            )
        values: NDArray[np.float32] = self._tensors[name].detach().float().cpu().numpy()
        return values


def _check_archive(path: Path) -> None:
    """Refuses an archive that would unpack to far more than it holds."""
    try:
        if not zipfile.is_zipfile(path):
            return  # the older format is no archive
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile) as exc:
        raise AdapterFormatError(f"not a readable archive: {exc}", path=path) from exc
    if unpacked > _MAX_RATIO * path.stat().st_size:
        raise AdapterFormatError(
            f"the archive would unpack to {unpacked} bytes, more than {_MAX_RATIO} times its size",
            path=path,
        )


def _load(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            f"{path}: PyTorch's own format can be read with torch alone, which is not installed",
            what="pickled weights without torch",
            hint="pip install torch, or save the adapter with safe_serialization=True",
        )
    torch = importlib.import_module("torch")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise AdapterFormatError(
            "torch cannot read it with weights_only: it holds more than plain tensors, and loading "
            "those could run a program",
            path=path,
            hint="save the adapter with safe_serialization=True",
        ) from exc
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as exc:
        reason = str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
        raise AdapterFormatError(
            f"torch cannot read it with weights_only: {reason}", path=path
        ) from exc
    if not isinstance(state, dict) or len(state) > MAX_TENSORS:
        raise AdapterFormatError("expected a dictionary of tensors", path=path)
    for name, value in state.items():
        if not isinstance(name, str) or len(name) > MAX_NAME or not torch.is_tensor(value):
            raise AdapterFormatError(
                f"expected names with tensors, got {name!r:.80}: {type(value).__name__}", path=path
            )
    return state
