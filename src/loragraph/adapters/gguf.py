"""GGUF adapter file -> Adapter, or every problem of the file. All or nothing.

Tensors are copied out of the file with plain reads, never mapped: a file that is overwritten in
place changes nothing that runs.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import (
    ALIGNMENT,
    Adapter,
    LoraPair,
    LoraTensor,
    allocate_block,
    scale_of,
)
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo
from loragraph.adapters.checks import DATA_CHECKS, FILE_CHECKS, header_problems, pair_problems
from loragraph.adapters.draft import (
    ALPHA_KEY,
    Draft,
    DraftPair,
    read_draft,
)
from loragraph.adapters.folder import folder_draft, gguf_file
from loragraph.adapters.report import LoadReport, coverage
from loragraph.adapters.tied import resolve_tied_output
from loragraph.adapters.values import Bytes, all_zero, dequantised
from loragraph.adapters.vectors import BaseRows, RowVectors, resolved
from loragraph.errors import (
    AdapterFormatError,
    CapacityError,
    GGUFError,
    LoragraphError,
)
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library

_log = logging.getLogger("loragraph.adapters")


def read_adapter(
    lib: Library,
    path: str | os.PathLike[str],
    base: BaseInfo | None,
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    rows: BaseRows | None = None,
    named: str | os.PathLike[str] | None = None,
) -> Adapter:
    """Loads an adapter for `base`; raises the first problem, in llama.cpp's order of checks.

    `path` is a GGUF file, or a folder of PEFT or MLX, which is converted for the base's file and
    so needs a base. None as base leaves out the checks of the fit, for tools that look at an
    adapter or write it out again; a graph must not run such an adapter.
    `ignore_norm` leaves `*_norm.weight` tensors out instead of refusing them. `tied_output` decides
    whether the token table's pair also changes a tied head; None: what the file says, else True.
    `rows` are the base's weights, which DoRA's magnitudes are relative to; without them an adapter
    that has some can be looked at, but not run. `named` is what errors call a file that was made of
    something else.
    Errors: GGUFError (container), AdapterFormatError, AdapterMismatchError (fit), UnsupportedError,
    CapacityError (no memory).
    """
    with gguf_file(lib, path, base) as file:
        draft = read_draft(
            lib, file, ignore_norm=ignore_norm, tied_output=tied_output, named=named or path
        )
        for problem in header_problems(draft, base):
            raise problem
        return _loaded(draft, base, rows)


def _loaded(draft: Draft, base: BaseInfo | None, rows: BaseRows | None) -> Adapter:
    pairs, nbytes = _layout(draft)
    try:
        data = allocate_block(nbytes)
    except MemoryError as exc:
        raise CapacityError(
            f"{draft.path}: failed to allocate buffer for lora adapter: no memory for {nbytes} "
            "bytes"
        ) from exc
    found = _fill(draft, pairs, data)
    dead = [
        target
        for target, pair in pairs.items()
        if _changes_nothing(pair, data) and not draft.pairs[target].vectors
    ]
    alone = [info for one in draft.alone.values() for info in one.vectors]
    if len(dead) == len(pairs) and not any(found[info.name].any() for info in alone):
        raise _would_change_nothing(draft)
    tied, tied_warning = resolve_tied_output(draft, base)
    warnings = (*_warnings(draft, base, pairs, dead), *([tied_warning] if tied_warning else []))
    for warning in warnings:
        _log.warning("%s: %s", draft.path, warning)
    return Adapter(
        pairs,
        data,
        _report(draft, base, pairs, data.nbytes, warnings),
        alpha=draft.alpha,
        metadata={**draft.scalars, **draft.arrays},
        invocation_tokens=draft.invocation_tokens,
        tied_output=tied,
        vectors=_vectors(draft, pairs, data, found, rows),
    )


def read_header(
    lib: Library,
    path: str | os.PathLike[str],
    base: BaseInfo | None,
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
) -> Draft:
    """What can be known and checked without reading a tensor, of a folder too.

    Raises the first problem, as `read_adapter` does; values that are not finite, or all zero, show
    only there.
    """
    if os.path.isdir(path):
        draft = folder_draft(
            lib, Path(path), base, ignore_norm=ignore_norm, tied_output=tied_output
        )
    else:
        draft = read_draft(lib, path, ignore_norm=ignore_norm, tied_output=tied_output)
    for problem in header_problems(draft, base):
        raise problem
    return draft


def memory_of(draft: Draft) -> tuple[int, int]:
    """Bytes that the loaded adapter will take, and those of its lora_b tensors among them."""
    halves = [_tensors(pair) for pair in draft.pairs.values()]
    nbytes = sum(_aligned(half.nbytes) for pair in halves for half in pair)
    # A magnitude comes with a gain and the rows' factors; lora_b's copy is F32 then.
    nbytes += sum(3 * part.nbytes for pair in draft.pairs.values() for part in pair.vectors)
    nbytes += sum(part.nbytes for pair in draft.alone.values() for part in pair.vectors)
    scaled = sum(
        4 * math.prod(_tensors(pair)[1].ne) for pair in draft.pairs.values() if pair.magnitude
    )
    return nbytes + scaled, sum(b.nbytes for _, b in halves)


def check_adapter(
    lib: Library,
    path: str | os.PathLike[str],
    base: BaseInfo | None = None,
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    named: str | os.PathLike[str] | None = None,
) -> list[LoragraphError]:
    """Every problem of the file, [] where it would load; without `base` what shows without one."""
    try:
        with gguf_file(lib, path, base) as file:
            draft = read_draft(
                lib, file, ignore_norm=ignore_norm, tied_output=tied_output, named=named or path
            )
            return _problems(draft, base)
    except LoragraphError as error:
        return [error]


def _problems(draft: Draft, base: BaseInfo | None) -> list[LoragraphError]:
    problems: list[LoragraphError] = [
        problem for check in FILE_CHECKS for problem in check(draft, base)
    ]
    sound = []
    for pair in (*draft.pairs.values(), *draft.alone.values()):
        found = list(pair_problems(draft, pair, base))
        problems += found
        if not found:
            sound.append(pair)
    n_zero = 0
    try:
        with draft.file.open("rb") as file:
            for pair in sound:
                found, zero = _data_problems(draft, pair, file)
                problems += found
                n_zero += zero
    except OSError as exc:
        problems.append(_unreadable(draft, exc))
    n_targets = len(draft.pairs) + len(draft.alone)
    if n_targets and n_zero == n_targets:
        problems.append(_would_change_nothing(draft))
    return problems


def _layout(draft: Draft) -> tuple[dict[str, LoraPair], int]:
    """Places in the block for all tensors, and the block's size in bytes."""
    end = 0
    pairs = {}
    for target, found in draft.pairs.items():
        halves = []
        for info in _tensors(found):
            halves.append(LoraTensor(info.type, info.ne, end, info.nbytes))
            end += _aligned(info.nbytes)
        a, b = halves
        pairs[target] = LoraPair(target, a, b, b.ne[0], _scale(draft, found))
    return pairs, end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _fill(draft: Draft, pairs: dict[str, LoraPair], data: Bytes) -> dict[str, Bytes]:
    """Reads all pairs into the block; gives the bytes of the vectors beside them by name."""
    vectors: dict[str, Bytes] = {}
    try:
        with draft.file.open("rb") as file:
            for target, found in draft.pairs.items():
                pair = pairs[target]
                for info, tensor in zip(_tensors(found), (pair.a, pair.b), strict=True):
                    part = data[tensor.offset : tensor.offset + tensor.nbytes]
                    _read_checked(draft, file, info, part)
            for found in (*draft.pairs.values(), *draft.alone.values()):
                for info in found.vectors:
                    vectors[info.name] = np.empty(info.nbytes, np.uint8)
                    _read_checked(draft, file, info, vectors[info.name])
    except OSError as exc:
        raise _unreadable(draft, exc) from exc
    return vectors


def _read_checked(draft: Draft, file: BinaryIO, info: TensorInfo, into: Bytes) -> None:
    _read(draft, file, info, into)
    for check in DATA_CHECKS:
        for problem in check(draft, info, into):
            raise problem


def _read(draft: Draft, file: BinaryIO, info: TensorInfo, into: Bytes) -> None:
    file.seek(info.offset)
    n_read = file.readinto(into)  # type: ignore[attr-defined]
    if n_read != info.nbytes:
        raise GGUFError(
            f"LoRA tensor '{info.name}' data is not within the file bounds, file is corrupted or "
            f"incomplete: expected {info.nbytes} bytes, got {n_read}",
            path=draft.path,
        )


def _data_problems(
    draft: Draft, pair: DraftPair, file: BinaryIO
) -> tuple[list[LoragraphError], bool]:
    """Problems of the values of a target, and whether they change nothing."""
    problems: list[LoragraphError] = []
    zero = not pair.is_alone and _scale(draft, pair) == 0
    halves = () if pair.is_alone else _tensors(pair)
    for info in (*halves, *pair.vectors):
        data = np.empty(info.nbytes, np.uint8)
        try:
            _read(draft, file, info, data)
        except GGUFError as error:
            return [error], False
        problems += (problem for check in DATA_CHECKS for problem in check(draft, info, data))
        zero = zero or all_zero(info.type, data)
    return problems, zero and (pair.is_alone or not pair.vectors)


def _vectors(
    draft: Draft,
    pairs: dict[str, LoraPair],
    data: Bytes,
    found: dict[str, Bytes],
    rows: BaseRows | None,
) -> dict[str, RowVectors]:
    """Magnitudes and biases, and what the graph needs of them."""
    vectors = {}
    for target, header in draft.pairs.items():
        if not header.vectors:
            continue
        pair = pairs[target]
        magnitude, bias = (
            None if info is None else found[info.name].view(np.float32)
            for info in (header.magnitude, header.bias)
        )
        a, b = _values(pair.a, data), _values(pair.b, data)
        is_table = target == TOKEN_EMBD
        vectors[target] = resolved(
            target, magnitude, bias, a, b, pair.scale, rows, is_table=is_table
        )
    for target, header in draft.alone.items():
        bias, delta = (
            None if info is None else found[info.name].view(np.float32)
            for info in (header.bias, header.delta)
        )
        vectors[target] = RowVectors(shift=bias, delta=delta)
    return vectors


def _values(half: LoraTensor, data: Bytes) -> NDArray[np.float32]:
    raw = data[half.offset : half.offset + half.nbytes]
    return dequantised(half.type, raw, half.ne)


def _report(
    draft: Draft,
    base: BaseInfo | None,
    pairs: dict[str, LoraPair],
    nbytes: int,
    warnings: tuple[str, ...],
) -> LoadReport:
    targets = (*draft.pairs.values(), *draft.alone.values())
    vectors = [part for one in targets for part in one.vectors]
    halves = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    return LoadReport(
        ranks={target: pair.rank for target, pair in pairs.items()},
        scales={target: pair.scale for target, pair in pairs.items()},
        coverage=coverage((*pairs, *draft.alone), base),
        n_tensors=len(halves) + len(vectors),
        n_params=sum(math.prod(half.ne) for half in halves)
        + sum(part.n_elements for part in vectors),
        base_params=base.n_params if base is not None else 0,
        nbytes=nbytes + sum(part.nbytes for part in vectors),
        alone=tuple(draft.alone),
        ignored=draft.norms,
        warnings=warnings,
    )


def _warnings(
    draft: Draft, base: BaseInfo | None, pairs: dict[str, LoraPair], dead: list[str]
) -> Iterator[str]:
    if ALPHA_KEY not in draft.scalars:
        yield f"{ALPHA_KEY} is missing: the user scale applies as it is, not divided by the rank"
    elif draft.alpha == 0:
        yield f"{ALPHA_KEY} is 0: the user scale applies as it is, not divided by the rank"
    elif draft.alpha < 0:
        yield f"{ALPHA_KEY} is negative ({draft.alpha:g}): the adapter is subtracted"
    if draft.norms:
        yield f"left out as asked: {len(draft.norms)} norm weights, {', '.join(draft.norms[:3])}"
    if dead:
        yield f"{len(dead)} of {len(pairs)} pairs are all zeros, {dead[0]} for one"
    if base is None:
        return
    wide = [t for t, pair in pairs.items() if pair.rank > min(base.targets[t].ne[:2])]
    if wide:
        yield f"{len(wide)} pairs have a rank above the sizes of their target, {wide[0]} for one"
    repacked = [target for target in pairs if base.targets[target].repacked]
    if repacked:
        yield (
            f"lora for '{repacked[0]}' and {len(repacked) - 1} more cannot use buft of the base's "
            "repacked weights, fallback to CPU: they stay in plain memory"
        )


def _changes_nothing(pair: LoraPair, data: Bytes) -> bool:
    return pair.scale == 0 or any(
        all_zero(half.type, data[half.offset : half.offset + half.nbytes])
        for half in (pair.b, pair.a)
    )


def _scale(draft: Draft, pair: DraftPair) -> float:
    """Effective scale at user scale 1; 0 where alpha / rank underflows."""
    return scale_of(draft.alpha, _tensors(pair)[1].ne[0], 1.0)


def _tensors(pair: DraftPair) -> tuple[TensorInfo, TensorInfo]:
    assert pair.a is not None  # the checks ran before
    assert pair.b is not None
    return pair.a, pair.b


def _would_change_nothing(draft: Draft) -> AdapterFormatError:
    return AdapterFormatError(
        "the adapter would change nothing: in every pair A, B or the scale is zero",
        path=draft.path,
        hint="an untrained adapter has B = 0",
    )


def _unreadable(draft: Draft, exc: OSError) -> GGUFError:
    return GGUFError(f"failed to read: {exc.strerror or exc}", path=draft.path)
