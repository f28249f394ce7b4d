"""Where an adapter's files are, and the bytes of its tensors, whatever wrote them.

Takes a folder of PEFT or MLX, or a file in one. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.convert.pickled import PickledTensors
from loragraph.adapters.convert.safetensors import StoredTensor, read_header, read_values
from loragraph.errors import AdapterFormatError, ConfigError, UnsupportedError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
"""PEFT's name, and MLX's."""

INDEX = "adapter_model.safetensors.index.json"
"""Names the files of weights that were split."""

PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
"""Reading these may run what their author wrote."""

_MAX_CONFIG_BYTES = 4 << 20
_MAX_SHARDS = 512
_SHARD = re.compile(r"[\w.-]+\.safetensors")

Values = NDArray[np.float32]


@dataclass(frozen=True)
class AdapterSource:
    """An adapter as a training framework left it."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    pickled: PickledTensors | None = None

    def values(self, name: str) -> Values:
        """A tensor's values as f32, all finite; AdapterFormatError for NaN and infinities."""
        info = self.tensors[name]
        values = read_values(info) if self.pickled is None else self.pickled.values(name)
        if not np.isfinite(values).all():
            raise AdapterFormatError(
                f"tensor '{name}': expected finite values, got an infinity or NaN",
                path=info.path,
                hint="the training diverged: take an earlier checkpoint",
            )
        return values


@dataclass(frozen=True)
class Location:
    """The files of an adapter, before any tensor is looked at."""

    folder: Path
    config_path: Path
    weights: tuple[Path, ...]  # safetensors, or one pickled file; () where there are none


def locate(path: str | os.PathLike[str]) -> Location:
    """The files behind `path`: a folder, its adapter_config.json or its weights."""
    given = Path(path)
    if not given.exists():
        raise AdapterFormatError("no such file or folder", path=given)
    folder = given if given.is_dir() else given.parent
    if given.is_file() and given.suffix == ".gguf":
        raise ConfigError(
            f"{given} is a GGUF file already: convert takes a PEFT or MLX adapter",
            hint="loragraph inspect shows what it holds",
        )
    named = given.is_file() and given.name != CONFIG
    weights = (given,) if named else _find_weights(folder)
    config = folder / CONFIG
    if not config.is_file():
        raise AdapterFormatError(f"expected a file {CONFIG}", path=folder, hint=_where_else(folder))
    return Location(folder, config, weights)


def read_config(location: Location) -> dict[str, Any]:
    """The JSON object of adapter_config.json."""
    path = location.config_path
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as exc:
        raise AdapterFormatError(f"failed to read: {exc.strerror}", path=path) from exc
    if text.startswith(b"version https://git-lfs"):
        raise AdapterFormatError(
            "this is a Git-LFS pointer, not the file", path=path, hint="git lfs pull"
        )
    if len(text) > _MAX_CONFIG_BYTES:
        raise AdapterFormatError(f"expected at most {_MAX_CONFIG_BYTES} bytes", path=path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise AdapterFormatError(f"no JSON: {exc}"[:300], path=path) from exc
    if not isinstance(config, dict):
        raise AdapterFormatError("expected a JSON object", path=path)
    return config


def open_source(location: Location, config: Mapping[str, Any]) -> AdapterSource:
    """The tensors behind a location, headers only where the format has them."""
    if not location.weights:
        raise AdapterFormatError(
            f"expected the weights beside {CONFIG}: one of {', '.join(WEIGHTS)}",
            path=location.folder,
            hint=_where_else(location.folder),
        )
    first = location.weights[0]
    if first.suffix != ".safetensors":
        pickled = PickledTensors(first)
        return AdapterSource(location.folder, config, pickled.infos, pickled)
    tensors: dict[str, StoredTensor] = {}
    for path in location.weights:
        part = read_header(path)
        twice = tensors.keys() & part.keys()
        if twice:
            raise AdapterFormatError("this tensor stands in two files", path=path, where=min(twice))
        tensors |= part
    return AdapterSource(location.folder, config, tensors)


def _find_weights(folder: Path) -> tuple[Path, ...]:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return (folder / name,)
    if (folder / INDEX).is_file():
        return tuple(folder / name for name in shard_names(folder))
    for name in PICKLED:
        if (folder / name).is_file():
            return (folder / name,)
    return ()


def shard_names(folder: Path) -> list[str]:
    """The files that an index names; only plain names, so that none lies outside the folder."""
    index = read_config(Location(folder, folder / INDEX, ()))
    mapping = index.get("weight_map")
    names = sorted({str(name) for name in mapping.values()}) if isinstance(mapping, dict) else []
    if not 1 <= len(names) <= _MAX_SHARDS or not all(_SHARD.fullmatch(name) for name in names):
        raise AdapterFormatError(
            f"expected a weight_map of 1 to {_MAX_SHARDS} files in this folder",
            path=folder / INDEX,
        )
    return names


def _where_else(folder: Path) -> str:
    """A hint at sub-folders that hold an adapter, as PEFT and Trainer make them."""
    try:
        found = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    except OSError:
        found = []
    if found:
        return f"there are adapters in its folders {', '.join(found[:5])}: name one of them"
    return "is it the folder that save_pretrained() or mlx_lm.lora wrote?"


def refuse_model_folder(location: Location) -> None:
    """UnsupportedError for a whole model saved where an adapter was expected."""
    if any(location.folder.glob("model*.safetensors")) and not location.weights:
        raise UnsupportedError(
            f"{location.folder}: holds a whole model, not an adapter",
            what="a whole model",
            hint="convert it with llama.cpp's convert_hf_to_gguf.py, then loragraph extract",
        )
