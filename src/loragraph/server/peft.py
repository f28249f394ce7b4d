"""PEFT and MLX folders as adapters: converted into a folder of the server's own. Never pickle."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from loragraph.errors import InvalidRequestError
from loragraph.server.state import ServerState
from loragraph.tools.convert import convert

_WEIGHTS = (
    "adapter_model.safetensors",
    "adapters.safetensors",
    "adapter_model.safetensors.index.json",
)
_MAX_ENTRIES = 2000


def converted(state: ServerState, name: str, folder: Path, root: Path) -> Path:
    """The GGUF file of a folder inside `root`, for the server's base; blocks.

    It is kept until forget(), or until the server ends. InvalidRequestError for a
    folder without safetensors or with links that lead out of `root`; what convert() raises.
    """
    entries = []
    with os.scandir(folder) as found:
        for entry in found:
            entries.append(entry.name)
            if len(entries) > _MAX_ENTRIES or not Path(entry.path).resolve().is_relative_to(root):
                raise InvalidRequestError(
                    f"lora_path: expected a folder of an adapter alone, got {folder.name}",
                    param="lora_path",
                    hint="links out of the adapters' folder are not followed",
                )
    if not set(_WEIGHTS) & set(entries):
        raise InvalidRequestError(
            f"lora_path: expected a GGUF file or a folder with {_WEIGHTS[0]}, got {folder.name}",
            param="lora_path",
            hint="pickled weights are never read",
        )
    own = _folder_of(state, name)
    own.mkdir(exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=own))
    engine = state.engine
    try:
        return convert(
            folder, engine.model.path, new / f"{folder.name}.gguf", name=name, lib=engine.model.lib
        )[0]
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def forget(state: ServerState, name: str, keep: Path | None = None) -> None:
    """Removes what was converted for a name, but for the file that it means now."""
    own = _folder_of(state, name)
    for folder in own.iterdir() if own.is_dir() else ():
        if keep is None or keep.parent != folder:
            shutil.rmtree(folder, ignore_errors=True)


def _folder_of(state: ServerState, name: str) -> Path:
    return state.folder / hashlib.sha256(name.encode()).hexdigest()[:16]
