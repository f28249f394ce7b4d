"""GGUF file -> what it holds, as JSON values: a base model, or an adapter with its fit to a base.

Reads headers, and of an adapter the values too; weights of a base are never read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loragraph.adapters.adapter import scale_of
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo, base_info_from_gguf
from loragraph.adapters.checks import type_name
from loragraph.adapters.draft import Draft, read_draft
from loragraph.adapters.folder import gguf_file
from loragraph.adapters.gguf import check_adapter, read_adapter
from loragraph.adapters.report import coverage, target_class
from loragraph.engine.model import load_problem
from loragraph.errors import ConfigError, GGUFError, LoragraphError
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.lib import Library
from loragraph.model.files import split_paths


def inspect_file(
    lib: Library,
    path: Path,
    base: Path | None = None,
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
) -> dict[str, Any]:
    """Facts of a base or an adapter, told apart by the file itself ("kind").

    A folder of PEFT or MLX is described as the adapter that it becomes for `base`.

    "tied_output" of an adapter is whether its pair of the token table changes a tied head too, None
    where that is no question: without such a pair, or without a tied base to look at.

    "problems" are what a load would refuse; an adapter's, without `base`, as far as the file alone
    shows it. LoragraphError where a file is no readable GGUF.
    """
    base_info = None
    if path.is_dir():  # made for the base, which is checked first
        base_info = None if base is None else read_base_info(lib, base)
        with gguf_file(lib, path, base_info) as made:
            with GGUFFile(lib, made) as file:
                metadata = _metadata(file)
            facts = _describe_adapter(lib, Path(made), path, base_info, ignore_norm, tied_output)
        return facts | {"metadata": metadata}
    with GGUFFile(lib, path) as file:
        if not _is_adapter(file):
            if base is not None:
                raise ConfigError(
                    f"only an adapter can be checked against a base, {path} is none", field="base"
                )
            if tied_output is not None:
                raise ConfigError(
                    f"only an adapter changes a tied head, {path} is none", field="tied_output"
                )
            return _describe_base(lib, file)
        metadata = _metadata(file)
    base_info = read_base_info(lib, base) if base is not None else None
    facts = _describe_adapter(lib, path, path, base_info, ignore_norm, tied_output)
    return facts | {"metadata": metadata}


def read_base_info(lib: Library, path: Path) -> BaseInfo:
    """The base in a GGUF file, or in all files of a split one, whichever of them is named."""
    with ExitStack() as stack:
        files = [stack.enter_context(GGUFFile(lib, part)) for part in split_paths(path)]
        return base_info_from_gguf(*files)


def _is_adapter(file: GGUFFile) -> bool:
    return file.scalar("general.type") == "adapter" or any(
        name.endswith((".lora_a", ".lora_b", ".lora_delta")) for name in file.tensors
    )


def _describe_base(lib: Library, file: GGUFFile) -> dict[str, Any]:
    problems: list[LoragraphError] = []
    files = [file]
    facts: dict[str, Any] = {"architecture": None, "name": None, "tied": None}
    with ExitStack() as stack:
        for part in split_paths(file.path):
            try:
                if part != file.path:
                    files.append(stack.enter_context(GGUFFile(lib, part)))
            except GGUFError as error:
                problems.append(error)
                break  # the others of a wrong count would only say the same
        files.sort(key=lambda part: part.path)
        try:
            info = base_info_from_gguf(*files)
            facts = {"architecture": info.arch, "name": info.name, "tied": info.tied}
        except LoragraphError as error:
            problems.append(error)
    if not problems:
        problem = load_problem(lib, files[0].path)
        problems += [problem] if problem is not None else []
    tensors = [tensor for part in files for tensor in part.tensors.values()]
    return {
        "kind": "base",
        "files": [str(part.path) for part in files],
        "file_bytes": sum(part.file_bytes for part in files),
        **facts,
        "n_tensors": len(tensors),
        "n_params": sum(tensor.n_elements for tensor in tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
        "types": _types(tensors),
        "metadata": _metadata(file),
        "problems": _problems(problems),
    }


def _describe_adapter(
    lib: Library,
    file: Path,
    named: Path,
    base: BaseInfo | None,
    ignore_norm: bool,
    tied_output: bool | None,
) -> dict[str, Any]:
    draft = read_draft(lib, file, ignore_norm=ignore_norm, tied_output=tied_output, named=named)
    problems = check_adapter(
        lib, file, base, ignore_norm=ignore_norm, tied_output=tied_output, named=named
    )
    loaded: dict[str, Any] = {"digest": None, "warnings": [], "tied_output": None}
    if not problems:
        with read_adapter(
            lib, file, base, ignore_norm=ignore_norm, tied_output=tied_output, named=named
        ) as adapter:
            loaded |= {"digest": adapter.digest, "warnings": list(adapter.report.warnings)}
            if base is not None and base.tied and TOKEN_EMBD in adapter.pairs:
                loaded["tied_output"] = adapter.tied_output
    weights = sorted(_weights(draft), key=lambda weight: _natural(weight["target"]))
    tensors = [
        part
        for pair in (*draft.pairs.values(), *draft.alone.values())
        for part in (pair.a, pair.b, *pair.vectors)
        if part is not None
    ]
    n_params = sum(tensor.n_elements for tensor in tensors)
    return {
        "kind": "adapter",
        "files": [str(named)],
        "architecture": draft.scalars.get("general.architecture"),
        "alpha": _plain(draft.scalars.get("adapter.lora.alpha")),
        "invocation_tokens": list(draft.invocation_tokens),
        "n_tensors": len(tensors),
        "n_params": n_params,
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
        "types": _types(tensors),
        "targets": _target_classes(draft, base, weights),
        "weights": weights,
        "base": _base_facts(base, n_params),
        **loaded,
        "problems": _problems(problems),
    }


def _base_facts(base: BaseInfo | None, n_params: int) -> dict[str, Any] | None:
    if base is None:
        return None
    return {
        "architecture": base.arch,
        "name": base.name,
        "n_params": base.n_params,
        "share": n_params / base.n_params if base.n_params else 0.0,
    }


def _weights(draft: Draft) -> Iterator[dict[str, Any]]:
    """One entry a target with both halves, or with vectors alone (rank 0); the effective scale is
    that at user scale 1."""
    for target, alone in draft.alone.items():
        yield {
            "target": target,
            "rank": 0,
            "scale": 1.0,
            "types": [type_name(part.type) for part in alone.vectors],
            "lora_a": [],
            "lora_b": [],
            "vectors": [part.name.rsplit(".", 1)[-1] for part in alone.vectors],
            "nbytes": sum(part.nbytes for part in alone.vectors),
        }
    for target, pair in draft.pairs.items():
        if pair.a is None or pair.b is None:
            continue
        rank = pair.b.ne[0]
        yield {
            "target": target,
            "rank": rank,
            "scale": _plain(scale_of(draft.alpha, rank, 1.0)),
            "types": [type_name(pair.a.type), type_name(pair.b.type)],
            "lora_a": list(pair.a.ne),
            "lora_b": list(pair.b.ne),
            "vectors": [part.name.rsplit(".", 1)[-1] for part in pair.vectors],
            "nbytes": sum(part.nbytes for part in (pair.a, pair.b, *pair.vectors)),
        }


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blk.2 before blk.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _target_classes(
    draft: Draft, base: BaseInfo | None, weights: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    ranks = defaultdict(set)
    for weight in weights:
        if weight["rank"]:
            ranks[target_class(weight["target"])].add(weight["rank"])
    return {
        name: {
            "changed": changed,
            "in_base": in_base if base is not None else None,
            "ranks": sorted(ranks[name]),
        }
        for name, (changed, in_base) in coverage((*draft.pairs, *draft.alone), base).items()
    }


def _types(tensors: Sequence[TensorInfo]) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        entry = types.setdefault(
            type_name(tensor.type), {"n_tensors": 0, "n_params": 0, "nbytes": 0}
        )
        entry["n_tensors"] += 1
        entry["n_params"] += tensor.n_elements
        entry["nbytes"] += tensor.nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["nbytes"]))


def _metadata(file: GGUFFile) -> dict[str, Any]:
    """Scalars as they are, arrays as their type and length."""
    metadata = {}
    for key in sorted(file):
        value = file.scalar(key)
        if value is None:
            metadata[key] = f"{file.type_of(key)}, {file.array_length(key)} values"
        else:
            metadata[key] = _plain(value)
    return metadata


def _problems(errors: Sequence[LoragraphError]) -> list[dict[str, str]]:
    return [{"error": type(error).__name__, "message": str(error)} for error in errors]


def _plain(value: Any) -> Any:
    """JSON has no infinities and NaN: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
