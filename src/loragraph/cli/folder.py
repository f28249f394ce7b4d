"""A PEFT or MLX folder where a GGUF adapter is expected: converted for the base at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loragraph.adapters.adapter import Adapter
from loragraph.engine.model import Model
from loragraph.errors import BackendError
from loragraph.tools.convert import convert


def load_any(
    path: str, model: Model, *, ignore_norm: bool = False, tied_output: bool | None = None
) -> Adapter:
    """Loads a GGUF adapter, or a folder of PEFT or MLX through a temporary file."""
    with _as_gguf(path, model) as file:
        return Adapter.load(file, model, ignore_norm=ignore_norm, tied_output=tied_output)


@contextmanager
def _as_gguf(path: str, model: Model) -> Iterator[str | Path]:
    """The path itself, or a file that lives as long as the block: a load copies all of it."""
    if not Path(path).is_dir():
        yield path
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="loragraph-")
    except OSError as exc:
        raise BackendError(f"no place for a temporary file: {exc.strerror}") from exc
    with folder as name:
        file, _ = convert(path, model.path, Path(name) / "adapter.gguf", lib=model.lib)
        yield file
