"""Several scaled adapter files as one file, exactly: by rank concatenation, no cross terms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo
from loragraph.adapters.checks import MAX_RANK
from loragraph.adapters.combine import combine
from loragraph.adapters.draft import TIED_OUTPUT_KEY
from loragraph.adapters.gguf import read_adapter
from loragraph.adapters.mix import Mix
from loragraph.adapters.vectors import row_lengths
from loragraph.engine.options import memory_errors
from loragraph.errors import AdapterMismatchError, ConfigError, UnsupportedError
from loragraph.ggml.lib import Library, load_library
from loragraph.model.files import ModelFiles, split_paths
from loragraph.tools.adapter_file import Factors, Floats, adapter_keys, out_type, write_adapter
from loragraph.tools.gguf_header import value_bytes
from loragraph.tools.merge import Paths, Scales, base_of, checked_scales
from loragraph.tools.output import check_output
from loragraph.tools.tensor_values import FileRows

NAMES_KEY = "loragraph.combine.names"
DIGESTS_KEY = "loragraph.combine.digests"
SCALES_KEY = "loragraph.combine.scales"
"""What an adapter was combined of: one entry an adapter in each array."""


@dataclass(frozen=True, slots=True)
class CombineReport:
    """What was combined."""

    path: Path
    ranks: Mapping[str, int]  # per target
    nbytes: int  # of the file
    warnings: tuple[str, ...] = field(default=())


def combine_files(
    adapters: Scales,
    output: Paths,
    *,
    base: Paths | None = None,
    outtype: str = "f32",
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    ggml_folder: Paths | None = None,
) -> CombineReport:
    """Writes one adapter that does what `adapters` (path -> user scale) do together.

    Ranks add up. Scales and alphas go into B, so the new adapter is to be used at scale 1; "f32"
    keeps the sum exact to f32 rounding. With `base` all are checked against it, and what the token
    table's pair does to a tied head is settled; without it they are checked against each other.

    DoRA that is alone on its targets at scale 1 is carried as it is. Several on one target, or one
    at another scale, are no low-rank change of W that a file could state without W (see
    `loragraph.adapters.combine`); with `base` their sum is written as one DoRA, relative to that
    base's weights, and without it refused.

    Errors: as for loading an adapter; AdapterMismatchError where they do not fit together;
    InvalidRequestError for unlike invocation tokens; UnsupportedError for such DoRA; ConfigError;
    OutputError.
    """
    lib = load_library(None if ggml_folder is None else Path(ggml_folder))
    type_ = out_type(outtype)
    pairs = checked_scales(adapters)
    out = Path(output)
    check_output(out, [path for path, _ in pairs] + ([Path(base)] if base is not None else []))
    with memory_errors(os.fspath(output)), ExitStack() as stack:
        info, rows = (None, None) if base is None else _open_base(lib, Path(base), stack)
        scales: dict[Adapter, float] = {}
        for path, scale in pairs:
            # Without a base the choice is only written down, below.
            tied_now = tied_output if info is not None else None
            adapter = read_adapter(
                lib, path, info, ignore_norm=ignore_norm, tied_output=tied_now, rows=rows
            )
            stack.callback(adapter.close)
            scales[adapter] = scale
        loaded, names = list(scales), [path.name for path, _ in pairs]
        _check_fit(loaded, names)
        tied = _tied_output(loaded, info is not None, tied_output)
        combined = stack.enter_context(combine(Mix(scales)))
        _check_ranks(combined)
        factors = [_factors_of(combined, target, rows) for target in combined.pairs]
        keys = _keys(scales, names, combined, tied)
        nbytes = write_adapter(lib, out, keys, factors, type_, combined.alone)
        warnings = [text for adapter in loaded for text in adapter.report.warnings]
        return CombineReport(
            path=out,
            ranks={target: pair.rank for target, pair in combined.pairs.items()},
            nbytes=nbytes,
            warnings=tuple(dict.fromkeys(warnings)),
        )


def _keys(
    scales: Mapping[Adapter, float], names: Sequence[str], combined: Adapter, tied: bool | None
) -> dict[str, bytes]:
    """The keys of the new file: what it is, and what it was made of."""
    parts = zip(scales.values(), names, strict=True)
    first = next(iter(scales))
    return adapter_keys(
        str(first.metadata["general.architecture"]),
        name=" + ".join(f"{scale:g} * {name}" for scale, name in parts),
        invocation_tokens=combined.invocation_tokens,
        tied_output=tied if TOKEN_EMBD in combined.pairs else None,
        extra={
            NAMES_KEY: value_bytes(names),
            DIGESTS_KEY: value_bytes([adapter.digest for adapter in scales]),
            SCALES_KEY: value_bytes(np.array(list(scales.values()), np.float32)),
        },
    )


def _check_fit(adapters: Sequence[Adapter], names: Sequence[str]) -> None:
    """One architecture, and equal sizes of the targets that several have."""
    first = adapters[0].metadata.get("general.architecture")
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    lengths: dict[str, tuple[tuple[int, ...], str]] = {}
    for adapter, name in zip(adapters, names, strict=True):
        arch = adapter.metadata.get("general.architecture")
        if arch != first:
            raise AdapterMismatchError(
                f"expected architecture '{first}' as of {names[0]}, got '{arch}'", adapter=name
            )
        for target, pair in adapter.pairs.items():
            outer = pair.a.ne[1] if target == TOKEN_EMBD else pair.a.ne[0]
            sizes = (outer, pair.b.ne[1], pair.a.ne[2])
            _check_same(target, sizes, *seen.setdefault(target, (sizes, name)), name)
        for target, vectors in adapter.vectors.items():
            vector = vectors.shift if vectors.delta is None else vectors.delta
            if vector is not None:
                sizes = vector.shape
                _check_same(target, sizes, *lengths.setdefault(target, (sizes, name)), name)


def _check_same(
    target: str, sizes: tuple[int, ...], before: tuple[int, ...], other: str, name: str
) -> None:
    if sizes != before:
        raise AdapterMismatchError(
            f"{target}: expected sizes {list(before)} as of {other}, got {list(sizes)}",
            adapter=name,
            tensor=target,
            hint="they were made for unlike base models",
        )


def _open_base(lib: Library, path: Path, stack: ExitStack) -> tuple[BaseInfo, FileRows]:
    """What adapters are checked against, and the weights that DoRA is relative to."""
    files = stack.enter_context(ModelFiles(lib, split_paths(path)[0]))
    return base_of(files), FileRows(lib, files)


def _factors_of(combined: Adapter, target: str, rows: FileRows | None) -> Factors:
    pair, vectors = combined.pairs[target], combined.vectors.get(target)
    a, b = combined.array(pair.a), combined.array(pair.b)
    if vectors is None:
        return Factors(target, a, b)
    if vectors.magnitude is None and vectors.gain is not None:
        assert rows is not None  # a gain comes of them
        return _as_dora(Factors(target, a, b, vectors.shift), vectors.gain, rows)
    return Factors(target, a, b, vectors.shift, vectors.magnitude)


def _as_dora(pair: Factors, gain: Floats, rows: FileRows) -> Factors:
    """W x (1 + gain) + B A x as m / ||W + B' A|| (W + B' A) x: B' = B / (1 + gain), and m fits."""
    factor = np.float64(1) + gain
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        b = (pair.b / factor[:, None]).astype(np.float32)
    if not np.isfinite(b).all():
        raise UnsupportedError(
            f"{pair.target}: a row of the base is multiplied by exactly 0 at these scales, which "
            "no DoRA can state",
            what="combining DoRA",
            hint="change a scale a little, or merge them into the base",
        )
    lengths = row_lengths(rows, pair.target, pair.a, b, 1.0, is_table=pair.target == TOKEN_EMBD)
    return replace(pair, b=b, magnitude=(factor * lengths).astype(np.float32))


def _check_ranks(combined: Adapter) -> None:
    if combined.rank_max > MAX_RANK:
        raise ConfigError(
            f"expected ranks that add up to at most {MAX_RANK}, got {combined.rank_max}",
            field="adapters",
            hint="resize some of them first",
        )


def _tied_output(adapters: Sequence[Adapter], has_base: bool, wanted: bool | None) -> bool | None:
    """What to write into the file's key; None: as undecided as the adapters' files are."""
    with_table = [adapter for adapter in adapters if TOKEN_EMBD in adapter.pairs]
    if not with_table:
        return None
    if wanted is not None:
        return wanted
    if has_base:
        return with_table[0].tied_output  # combine() refuses unlike ones
    stated = {adapter.metadata.get(TIED_OUTPUT_KEY) for adapter in with_table}
    if len(stated) > 1:
        raise ConfigError(
            f"expected adapters that agree on {TIED_OUTPUT_KEY}, got unlike ones",
            field="tied_output",
            hint="say what the token table's pair does with tied_output, or give the base",
        )
    (value,) = stated
    return value if isinstance(value, bool) else None
