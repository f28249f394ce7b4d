"""A PEFT or MLX folder where an adapter's GGUF file is expected: one way for all callers.

What the header tells comes from the folder's own headers and configuration; for the values it is
converted into a private temporary file that lives while it is read. Weights that were pickled are
never read on the way: reading such a file may run what its author wrote.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loragraph.adapters.base import BaseInfo
from loragraph.adapters.convert import Plan, plan_conversion
from loragraph.adapters.convert.source import CONFIG, locate
from loragraph.adapters.convert.write import out_tensors, write_plan
from loragraph.adapters.draft import (
    ALPHA_KEY,
    INVOCATION_KEY,
    TIED_OUTPUT_KEY,
    Draft,
    sort_tensors,
)
from loragraph.errors import BackendError, ConfigError, LoragraphError, UnsupportedError
from loragraph.ggml.gguf import Scalar, TensorInfo
from loragraph.ggml.lib import Library

_MAX_ENTRIES = 2000


@contextmanager
def gguf_file(
    lib: Library, path: str | os.PathLike[str], base: BaseInfo | None
) -> Iterator[str | os.PathLike[str]]:
    """The path itself, or of a folder a GGUF file for `base` that lives as long as the block.

    ConfigError without a base, UnsupportedError for pickled weights, and what converting raises,
    all with the folder's name; BackendError where there is no place for the file.
    """
    if not os.path.isdir(path):
        yield path
        return
    plan = _planned(lib, Path(path), base)
    try:
        folder = tempfile.TemporaryDirectory(prefix="loragraph-")
    except OSError as exc:
        raise BackendError(
            f"{os.fspath(path)}: no place for a temporary file: {exc.strerror}"
        ) from exc
    with folder as name:
        file = Path(name) / "adapter.gguf"
        with _naming(path):
            try:
                write_plan(plan, file, "f32", Path(path).resolve().name)
            except ConfigError as exc:  # the output is ours, not one that somebody chose
                raise BackendError(f"no place for a temporary file: {exc.message}") from exc
        yield file


def folder_draft(
    lib: Library,
    path: Path,
    base: BaseInfo | None,
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
) -> Draft:
    """The header that the folder's GGUF file will have; no value of a tensor is read."""
    plan = _planned(lib, path, base)
    tensors = {}
    for tensor in out_tensors(plan, "f32"):
        n0, n1, n2, n3 = (*reversed(tensor.shape), 1, 1, 1)[:4]
        ne = (n0, n1, n2, n3)
        tensors[tensor.name] = TensorInfo(tensor.name, tensor.type, ne, 0, tensor.nbytes, path)
    scalars: dict[str, Scalar] = {
        "general.type": "adapter",
        "general.architecture": plan.base.info.arch,
        "adapter.type": "lora",
        ALPHA_KEY: plan.alpha,
    }
    types = dict.fromkeys(scalars, "string") | {ALPHA_KEY: "f32"}
    if plan.tied_output is not None:
        scalars[TIED_OUTPUT_KEY] = plan.tied_output
        types[TIED_OUTPUT_KEY] = "bool"
    if plan.config.invocation_tokens:
        types[INVOCATION_KEY] = "array of u32"
    return Draft(
        path=path,
        file=path,
        scalars=scalars,
        types=types,
        invocation_tokens=plan.config.invocation_tokens,
        ignore_norm=ignore_norm,
        tied_output=tied_output,
        **sort_tensors(tensors)._asdict(),
    )


def is_adapter_folder(path: Path) -> bool:
    """Whether a folder looks like what PEFT or MLX saved."""
    return (path / CONFIG).is_file()


def folder_problem(folder: Path, root: Path) -> str | None:
    """What keeps a folder that others can fill from being read: its links must stay in `root`.

    `root` is resolved. OSError where it cannot be listed.
    """
    n_entries = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            n_entries += 1
            if n_entries > _MAX_ENTRIES:
                return f"more than {_MAX_ENTRIES} files"
            if not Path(entry.path).resolve().is_relative_to(root):
                return "a link that leads out of the adapters' folder"
    return None


def _planned(lib: Library, path: Path, base: BaseInfo | None) -> Plan:
    if base is None or base.path is None:
        raise ConfigError(
            f"{path} is a folder of PEFT or MLX, and a base is needed to read it",
            field="base",
            hint="give the base, or convert the folder first",
        )
    with _naming(path):
        weights = locate(path).weights
        if weights and weights[0].suffix != ".safetensors":
            raise UnsupportedError(
                f"{path}: holds pickled weights, {weights[0].name}, which are not read on the way",
                what="pickled weights",
                hint="loragraph convert reads them where torch is installed",
            )
        return plan_conversion(path, base.path, lib=lib)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Has every error say which folder it is about."""
    try:
        yield
    except LoragraphError as error:
        error.add_place(os.fspath(path))
        raise
