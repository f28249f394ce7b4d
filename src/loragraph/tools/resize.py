"""An adapter to another rank: the best approximation of each pair's product, with its error.

Semantics: s B A = U diag(σ) V, exactly, by QR of both factors and an r x r decomposition; the first
k directions are kept. The relative error (Frobenius) is sqrt(1 - captured energy). Biases and
DoRA's magnitudes stay as they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import TOKEN_EMBD
from loragraph.adapters.checks import MAX_RANK
from loragraph.adapters.draft import ALPHA_KEY
from loragraph.adapters.folder import gguf_file
from loragraph.adapters.gguf import read_adapter
from loragraph.engine.options import integer, memory_errors
from loragraph.errors import ConfigError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import Library, load_library
from loragraph.tools.adapter_file import Factors, out_type, write_adapter
from loragraph.tools.deltas import Term, Use, delta_of
from loragraph.tools.gguf_header import read_header
from loragraph.tools.inspect import read_base_info
from loragraph.tools.merge import Paths
from loragraph.tools.output import check_output
from loragraph.tools.svd import Floats, Svd, svd_of_product


@dataclass(frozen=True, slots=True)
class RankChoice:
    """One target's new rank and what it costs."""

    target: str
    rank_before: int  # 0: it had no pair before
    rank: int
    energy: float  # captured share of the energy, in [0, 1]

    @property
    def error(self) -> float:
        """Relative error (Frobenius norm) of the change."""
        return math.sqrt(max(0.0, 1.0 - self.energy))


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """What a resize did."""

    path: Path
    choices: Sequence[RankChoice]
    nbytes_before: int
    nbytes: int
    warnings: tuple[str, ...] = field(default=())


def resize_file(
    adapter: Paths,
    output: Paths,
    *,
    rank: int | None = None,
    energy: float | None = None,
    outtype: str = "f32",
    base: Paths | None = None,
    ignore_norm: bool = False,
    ggml_folder: Paths | None = None,
) -> ResizeReport:
    """Writes an adapter with smaller ranks: at most `rank`, or as few as capture `energy`, or both.

    `base` is the model that the adapter is for; a folder of PEFT or MLX needs it, for any other the
    fit is checked.

    A pair whose rank is smaller already keeps it. Strength, invocation tokens and all keys stay as
    they are but for alpha, which follows the ranks. Errors: as for loading an adapter; ConfigError
    for a rank or a share of energy that makes no sense; OutputError.
    """
    lib = load_library(None if ggml_folder is None else Path(ggml_folder))
    type_ = out_type(outtype)
    if rank is None and energy is None:
        raise ConfigError("expected a rank, a share of energy or both, got none", field="rank")
    limit = MAX_RANK if rank is None else integer(rank, "rank", 1, MAX_RANK)
    share = 1.0 if energy is None else _share(energy)
    out = Path(output)
    check_output(out, [Path(adapter)] + ([Path(base)] if base is not None else []))
    info = None if base is None else read_base_info(lib, Path(base))
    with (
        memory_errors(os.fspath(adapter)),
        gguf_file(lib, adapter, info) as file,
        read_adapter(lib, file, info, ignore_norm=ignore_norm, named=adapter) as loaded,
    ):
        if not loaded.pairs:
            raise ConfigError(f"{adapter} has no low-rank pair to resize", field="adapter")
        factors, choices = [], []
        for target in loaded.pairs:
            pair, choice = resized(loaded, target, limit, share)
            factors.append(pair)
            choices.append(choice)
        nbytes = write_adapter(lib, out, _keys(lib, Path(file)), factors, type_, loaded.alone)
        return ResizeReport(
            path=out,
            choices=tuple(choices),
            nbytes_before=Path(file).stat().st_size,
            nbytes=nbytes,
            warnings=loaded.report.warnings,
        )


def resized(adapter: Adapter, target: str, limit: int, share: float) -> tuple[Factors, RankChoice]:
    """One pair at full scale with the smallest rank that captures `share`, at most `limit`.

    All experts of a stack get the same rank; the share is that of all of them together.
    """
    before = adapter.pairs[target].rank
    delta = delta_of([Term(Use(adapter, 1.0), target)])
    svds = [svd_of_product(*pair) for pair in zip(delta.left, delta.right, strict=True)]
    rank = min(limit, before, max(svd.rank_for(share) for svd in svds))
    choice = RankChoice(target, before, rank, captured(svds, rank))
    products = [svd.factors(rank) for svd in svds]
    if rank == before and len(svds) == 1:  # nothing to cut: the factors as they were
        products = [(delta.left[0], delta.right[0])]
    pair = pair_of(target, products)
    vectors = adapter.vectors.get(target)
    if vectors is not None:  # a magnitude is that of W + s B A, whatever approximates B A
        pair = replace(pair, shift=vectors.shift, magnitude=vectors.magnitude)
    return pair, choice


def captured(svds: Sequence[Svd], rank: int) -> float:
    """Share of the energy of all matrices that their first `rank` directions hold."""
    total = sum(svd.total for svd in svds)
    if total <= 0:
        return 1.0
    return sum(svd.captured(rank) * svd.total for svd in svds) / total


def pair_of(target: str, products: Sequence[tuple[Floats, Floats]]) -> Factors:
    """A pair from left (n_out, rank) and right (rank, n_in) of each expert."""
    if target == TOKEN_EMBD:
        ((left, right),) = products
        return Factors(target, left, np.ascontiguousarray(right.T))
    lefts, rights = zip(*products, strict=True)
    if len(products) == 1:
        return Factors(target, rights[0], lefts[0])
    return Factors(target, np.stack(rights), np.stack(lefts))


def _share(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"expected a share from 0 to 1, got {value!r}", field="energy")
    return float(value)


def _keys(lib: Library, path: Path) -> Mapping[str, bytes]:
    """The adapter's own keys; alpha is written with the new ranks."""
    with GGUFFile(lib, path) as file:
        keys = dict(read_header(file).keys)
    keys.pop(ALPHA_KEY, None)
    keys.pop("general.alignment", None)  # the new file has the usual one
    return keys
