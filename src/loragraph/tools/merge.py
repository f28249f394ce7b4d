"""Merge: a base and scaled adapters to one model file, tensor by tensor.

Each changed tensor is read in pieces of rows, turned into f32, W + s B A is added up in f32 and
stored in its type again. What no adapter touches is copied byte for byte, and so are the keys.
Memory: the adapters, the two factors of the tensors at work, and a few MB for each thread.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo, base_info
from loragraph.adapters.gguf import read_adapter
from loragraph.engine.options import memory_errors, threads
from loragraph.errors import ConfigError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.handles import F32
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.quants import can_read, can_write, needs_importance, row_bytes, type_name
from loragraph.model.files import ModelFiles, split_paths
from loragraph.model.fold import latent_tables, read_fold
from loragraph.tools.deltas import Changes, Term, Use, changes_of, check_mergeable
from loragraph.tools.file_type import FileType, ModelShape, file_type, target_types
from loragraph.tools.gguf_header import OutTensor, RawHeader, integer_bytes, read_header
from loragraph.tools.merge_record import record_keys
from loragraph.tools.merge_run import Piece, Progress, run_pieces
from loragraph.tools.merge_vectors import with_vectors
from loragraph.tools.output import check_output
from loragraph.tools.split import Part, plan_parts
from loragraph.tools.tensor_values import FileRows

Paths = str | os.PathLike[str]
Scales = Mapping[Any, float] | Iterable[tuple[Paths, float]]
"""Adapter files with user scales: a mapping, or pairs, in which a file may stand twice."""

_log = logging.getLogger("loragraph.tools")


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did."""

    paths: tuple[Path, ...]  # the files written
    n_merged: int  # tensors changed by an adapter
    n_converted: int  # further tensors stored in another type
    n_copied: int  # tensors copied byte for byte
    untied: bool  # a head of its own was written beside the token table
    nbytes: int  # of all files
    types: Mapping[str, int]  # tensors by type name
    warnings: tuple[str, ...] = field(default=())


def merge(
    base: Paths,
    adapters: Scales,
    output: Paths,
    *,
    type: str = "keep",
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    max_split_bytes: int = 0,
    n_threads: int | None = None,
    ggml_folder: Paths | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Writes `base` (of a split model: any part) with `adapters` (path -> user scale) added.

    `type` "keep" stores every tensor in the type it has, and copies what no adapter touches byte
    for byte; "f16", "q4_k_m", … stores the whole model in that file type, by llama.cpp's rule of
    which tensors keep more bits. `max_split_bytes` above 0 writes parts of at most so many bytes of
    tensors, named …-00001-of-00002.gguf. On a tied base a head of its own is written where table
    and head come to differ. The file appears when it is complete, or not at all. `progress` gets
    (bytes of the base done, bytes in all).

    Errors: GGUFError, AdapterFormatError, AdapterMismatchError, UnsupportedError (an aLoRA, a
    type that ggml cannot write), ConfigError, InvalidRequestError (a scale), OutputError.
    """
    lib = load_library(None if ggml_folder is None else Path(ggml_folder))
    n_threads = threads(n_threads)
    kind = file_type(type)
    pairs = checked_scales(adapters)
    with memory_errors(str(base)), ExitStack() as stack:
        files = stack.enter_context(ModelFiles(lib, split_paths(Path(base))[0]))
        inputs = [*files.paths, *(path for path, _ in pairs)]
        check_output(Path(output), inputs)
        info = base_of(files)
        refuse_folded(files)
        uses = []
        for path, scale in pairs:
            adapter = read_adapter(
                lib,
                path,
                info,
                ignore_norm=ignore_norm,
                tied_output=tied_output,
                rows=FileRows(lib, files),
            )
            stack.callback(adapter.close)
            uses.append(Use(adapter, scale))
        names = [path.name for path, _ in pairs]
        check_mergeable(uses, names)
        changes = changes_of(uses, tied=info.tied)
        header = read_header(files.metadata)
        pieces = with_vectors(
            lib, files.tensors, info, changes, _pieces(lib, files, header, changes, kind)
        )
        parts = _parts(files, header, pieces, Path(output), max_split_bytes, kind, uses, names)
        for part in parts:
            check_output(part.path, inputs)
        run_pieces(lib, pieces, parts, n_threads, progress)
        return _report(lib, pieces, parts, changes, uses)


def checked_scales(adapters: Scales) -> list[tuple[Path, float]]:
    """(path, user scale) of every adapter; ConfigError where all of them would change nothing."""
    pairs = [
        (Path(path), _scale(scale))
        for path, scale in (adapters.items() if isinstance(adapters, Mapping) else adapters)
    ]
    if not any(scale for _, scale in pairs):
        raise ConfigError(
            "expected at least one adapter with a scale that is not 0", field="adapters"
        )
    return pairs


def base_of(files: ModelFiles) -> BaseInfo:
    """The base in the opened files, as adapters are checked against it."""
    metadata = files.metadata
    kind = metadata.string("general.type", "model")
    if kind != "model":
        raise ConfigError(
            f"expected a base model, got {metadata.path} of general.type '{kind}'",
            field="base",
            hint="the base comes first, adapters follow --lora",
        )
    shapes = {name: tensor.ne for name, tensor in files.tensors.items()}
    name = metadata.string("general.name", files.path.stem)
    base = base_info(metadata.string("general.architecture"), name, shapes)
    return replace(base, latent=latent_tables(metadata), path=files.path)


def refuse_folded(files: ModelFiles) -> None:
    """UnsupportedError where weights are Hadamard-folded: a plain change does not fit to them."""
    if read_fold(files.metadata) is not None:
        raise UnsupportedError(
            f"{files.path}: expected plain weights, got prism.hadamard folded ones",
            what="merging with folded weights",
            hint="adapters apply to them at run time",
        )


def _scale(scale: float) -> float:
    """A user scale, checked."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ConfigError(f"expected a finite number as scale, got {scale!r}", field="scale")
    return float(scale)


def _pieces(
    lib: Library,
    files: ModelFiles,
    header: RawHeader,
    changes: Changes,
    kind: FileType | None,
) -> list[Piece]:
    """Every tensor of the output, in the base's order; a new head comes last."""
    sources = dict(files.tensors)
    if changes.untie:
        sources[OUTPUT] = sources[TOKEN_EMBD]
    types = {name: source.type for name, source in sources.items()}
    if kind is not None:
        tensors = {name: (source.type, source.ne) for name, source in sources.items()}
        types = target_types(lib, kind, tensors, _model_shape(files.metadata))
    sizes = {files.path: header.sizes}
    sizes |= {path: _sizes(lib, path) for path in files.paths if path not in sizes}
    pieces = []
    for name, source in sources.items():
        terms = changes.terms.get(name, ())
        factor = _factor(files, name, source, terms)
        type_ = types[name]
        if terms or type_ != source.type:
            _check_types(lib, name, source, type_)
        n_in = source.ne[0]
        nbytes = source.n_elements // n_in * row_bytes(lib, type_, n_in)
        out = OutTensor(name, sizes[source.path][source.name], type_, nbytes)
        pieces.append(Piece(out, source, terms, factor))
    return pieces


def _sizes(lib: Library, path: Path) -> Mapping[str, tuple[int, ...]]:
    """Sizes of a file's tensors as it states them: a vector may have one or more."""
    with GGUFFile(lib, path) as part:
        return read_header(part).sizes


def _factor(
    files: ModelFiles, name: str, source: TensorInfo, terms: Sequence[Term]
) -> TensorInfo | None:
    """The tensor of the factor w_s of a changed weight, if it has one."""
    factor = files.tensors.get(source.name.removesuffix(".weight") + ".scale")
    if factor is None or not terms:
        return None
    if factor.type != F32 or source.name == TOKEN_EMBD:
        raise UnsupportedError(
            f"{name}: a change cannot be merged beside {factor.name}: it scales the head alone, or "
            "is no F32 tensor",
            what=f"merging beside {factor.name}",
        )
    return factor


def _check_types(lib: Library, name: str, source: TensorInfo, type_: int) -> None:
    for wrong, action in (
        (None if can_read(lib, source.type) else source.type, "read"),
        (None if can_write(lib, type_) else type_, "write"),
    ):
        if wrong is not None:
            raise UnsupportedError(
                f"{name}: ggml cannot {action} type {type_name(lib, wrong)}",
                what=f"type {type_name(lib, wrong)}",
                hint="--type f16 or another one that ggml quantises to",
            )


def _model_shape(metadata: GGUFFile) -> ModelShape:
    arch = metadata.string("general.architecture")
    n_layer = metadata.integer(f"{arch}.block_count")
    n_head = _first(metadata, f"{arch}.attention.head_count", 1)
    n_head_kv = _first(metadata, f"{arch}.attention.head_count_kv", n_head)
    return ModelShape(
        n_layer=n_layer,
        n_expert=metadata.integer(f"{arch}.expert_count", 0),
        n_gqa=n_head // n_head_kv if n_head_kv else 0,
        is_70b=arch == "llama" and n_layer == 80 and n_head != n_head_kv,
    )


def _first(metadata: GGUFFile, key: str, default: int) -> int:
    """An integer, or the first of an array with one a layer."""
    if metadata.type_of(key).startswith("array"):
        values = metadata.numbers(key)
        return int(values[0]) if len(values) else default
    return metadata.integer(key, default)


def _parts(
    files: ModelFiles,
    header: RawHeader,
    pieces: Sequence[Piece],
    out: Path,
    max_bytes: int,
    kind: FileType | None,
    uses: Sequence[Use],
    names: Sequence[str],
) -> list[Part]:
    keys = {**header.keys, **record_keys(files.metadata, uses, names)}
    if kind is not None:
        keys["general.file_type"] = integer_bytes(kind.number, 32)
        keys["general.quantization_version"] = integer_bytes(2, 32)
    return plan_parts(
        out,
        keys,
        [piece.out for piece in pieces],
        version=header.version,
        alignment=header.alignment,
        max_bytes=max_bytes,
    )


def _report(
    lib: Library,
    pieces: Sequence[Piece],
    parts: Sequence[Part],
    changes: Changes,
    uses: Sequence[Use],
) -> MergeReport:
    n_merged = sum(bool(piece.terms) or piece.made is not None for piece in pieces)
    n_copied = sum(piece.is_copy for piece in pieces)
    types = Counter(type_name(lib, piece.out.type) for piece in pieces)
    warnings = [warning for use in uses for warning in use.adapter.report.warnings]
    low = sorted(
        {
            type_name(lib, piece.out.type)
            for piece in pieces
            if not piece.is_copy and needs_importance(lib, piece.out.type)
        }
    )
    if low:
        warnings.append(
            f"{', '.join(low)} wants an importance matrix, none was used: the changed tensors lose "
            "precision; --type q4_k_m or above does not need one"
        )
    return MergeReport(
        paths=tuple(part.path for part in parts),
        n_merged=n_merged,
        n_converted=len(pieces) - n_merged - n_copied,
        n_copied=n_copied,
        untied=changes.untie,
        nbytes=sum(part.nbytes for part in parts),
        types=dict(types.most_common()),
        warnings=tuple(dict.fromkeys(warnings)),
    )
