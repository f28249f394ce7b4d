"""The difference of two models as an adapter: a truncated SVD of each changed matrix.

What no low-rank adapter can hold (norm weights, biases, tensors of other kinds) is compared too,
and reported where it differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo, TargetKind
from loragraph.adapters.checks import MAX_RANK
from loragraph.engine.options import integer, memory_errors
from loragraph.errors import AdapterMismatchError, ConfigError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.quants import type_name
from loragraph.model.files import ModelFiles
from loragraph.tools.adapter_file import Factors, adapter_keys, out_type, write_adapter
from loragraph.tools.merge import Paths, base_of, check_not_folded
from loragraph.tools.output import check_output
from loragraph.tools.resize import RankChoice, captured, pair_of
from loragraph.tools.svd import truncated_svd
from loragraph.tools.tensor_values import read_f32

Progress = Callable[[int, int], None]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor that differs and is not in the adapter."""

    name: str
    change: float  # norm of the difference over the norm of the base's tensor
    reason: str


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """What an extraction found."""

    path: Path
    choices: Sequence[RankChoice]
    changes: Mapping[str, float]  # per target: norm of the difference over that of the base
    left: Sequence[Left]
    nbytes: int
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor to compare: its name in the adapter, and where both values stand."""

    target: str
    tuned: TensorInfo
    base: TensorInfo
    kind: TargetKind
    # The factors w_s of both: what a weight does is w_s W.
    tuned_factor: TensorInfo | None = None
    base_factor: TensorInfo | None = None


def extract(
    tuned: Paths,
    base: Paths,
    output: Paths,
    *,
    rank: int,
    outtype: str = "f32",
    exact: bool = False,
    ggml_folder: Paths | None = None,
    progress: Progress | None = None,
) -> ExtractReport:
    """Writes the adapter of `rank` that comes nearest to making `tuned` of `base`.

    Both are GGUF models (of split ones the first part) with the same tensors, of any types; `exact`
    decomposes large matrices in full, which takes minutes each. At full rank, written as f32, base
    and adapter together are the tuned model. Matrices that do not differ get no pair. Progress
    counts bytes of the tuned model.

    Errors: GGUFError, AdapterMismatchError where the models' tensors differ, ConfigError where
    they are equal or an argument is wrong, OutputError.
    """
    lib = load_library(None if ggml_folder is None else Path(ggml_folder))
    type_ = out_type(outtype)
    rank = integer(rank, "rank", 1, MAX_RANK)
    out = Path(output)
    with memory_errors(str(tuned)), ExitStack() as stack:
        files = [stack.enter_context(ModelFiles(lib, path)) for path in (tuned, base)]
        check_output(out, [path for file in files for path in file.paths])
        infos = [base_of(file) for file in files]
        for file in files:
            check_not_folded(file)
        jobs, tied_output = _jobs(files[0], files[1], infos[0], infos[1])
        found = _Found()
        total, done = sum(job.tuned.nbytes for job in jobs), 0
        for job in jobs:
            found.add(lib, job, rank, exact)
            done += job.tuned.nbytes
            if progress is not None:
                progress(done, total)
        if not found.factors:
            raise ConfigError(
                "expected two models whose matrices differ, got equal ones"
                + (f" ({len(found.left)} other tensors differ)" if found.left else ""),
                field="tuned",
            )
        has_table = any(pair.target == TOKEN_EMBD for pair in found.factors)
        keys = adapter_keys(
            infos[1].arch,
            name=f"{infos[0].name} minus {infos[1].name}",
            tied_output=tied_output if has_table and infos[1].tied else None,
        )
        nbytes = write_adapter(lib, out, keys, found.factors, type_)
        return ExtractReport(
            path=out,
            choices=tuple(found.choices),
            changes=found.changes,
            left=tuple(found.left),
            nbytes=nbytes,
            warnings=tuple(_warnings(lib, jobs, found)),
        )


class _Found:
    """What has been found so far."""

    def __init__(self) -> None:
        self.factors: list[Factors] = []
        self.choices: list[RankChoice] = []
        self.changes: dict[str, float] = {}
        self.left: list[Left] = []

    def add(self, lib: Library, job: _Job, rank: int, exact: bool) -> None:
        """Compares one tensor."""
        before = _effective(lib, job.base, job.base_factor)
        difference = _effective(lib, job.tuned, job.tuned_factor)
        with np.errstate(over="ignore"):
            difference -= before
        norm, change = _norm(before), _norm(difference)
        del before
        if change == 0:
            return
        relative = change / norm if norm else math.inf
        if job.kind is TargetKind.NONE:
            self.left.append(Left(job.target, relative, "no low-rank part applies to it"))
            return
        n_out = job.base.ne[1]
        parts = difference.reshape(-1, n_out, job.base.ne[0])
        svds = [truncated_svd(part, rank, exact=exact) for part in parts]
        chosen = min(rank, max(_useful(svd.s) for svd in svds))
        self.factors.append(pair_of(job.target, [svd.factors(chosen) for svd in svds]))
        self.choices.append(RankChoice(job.target, 0, chosen, captured(svds, chosen)))
        self.changes[job.target] = relative


def _effective(lib: Library, info: TensorInfo, factor: TensorInfo | None) -> Floats:
    """The values with their factor, one of the tensor or one of each expert."""
    values = read_f32(lib, info)
    if factor is not None:
        scales = read_f32(lib, factor).reshape(-1)
        values.reshape(len(scales), -1)[:] *= scales[:, None]
    return values


def _useful(s: NDArray[np.float64]) -> int:
    """Directions above the rounding of the two models, at least 1: the rest would be noise."""
    return max(1, int(np.sum(s > s[0] * 1e-9))) if len(s) else 1


def _norm(values: Floats) -> float:
    return math.sqrt(float(np.sum(np.square(values, dtype=np.float64))))


def _jobs(
    tuned: ModelFiles, base: ModelFiles, tuned_info: BaseInfo, base_info: BaseInfo
) -> tuple[list[_Job], bool]:
    """Which tensors to compare, and whether the token table's pair changes a tied head too.

    A tied head counts as a tensor of its own where one of the models has it apart.
    """
    if tuned_info.arch != base_info.arch:
        raise AdapterMismatchError(
            f"expected a tuned model of architecture '{base_info.arch}', got '{tuned_info.arch}'"
        )
    sides = [dict(tuned.tensors), dict(base.tensors)]
    untied = any(OUTPUT in side for side in sides)
    if untied:
        for side in sides:
            if OUTPUT not in side and TOKEN_EMBD in side:
                side[OUTPUT] = side[TOKEN_EMBD]
    new, old = sides
    for name in sorted(new.keys() ^ old.keys()):
        owner = "the tuned model" if name in new else "the base"
        raise AdapterMismatchError(
            f"{name}: only {owner} has this tensor", tensor=name, hint="are both of one family?"
        )
    jobs = []
    for name, info in new.items():
        if info.ne != old[name].ne:
            raise AdapterMismatchError(
                f"{name}: expected sizes {list(old[name].ne)} as in the base, got {list(info.ne)}",
                tensor=name,
                hint="was the vocabulary extended?",
            )
        factor = info.name.removesuffix(".weight") + ".scale"
        kind = base_info.targets[name].kind
        if name.endswith(".scale") and name.removesuffix(".scale") + ".weight" in new:
            continue  # compared with its weight
        jobs.append(_Job(name, info, old[name], kind, new.get(factor), old.get(factor)))
    return jobs, not untied


def _warnings(lib: Library, jobs: Sequence[_Job], found: _Found) -> Iterator[str]:
    if found.left:
        worst = max(found.left, key=lambda left: left.change)
        yield (
            f"{len(found.left)} tensors differ that a low-rank adapter cannot hold, most of all "
            f"{worst.name} (by {worst.change:.2%}): the adapter leaves them as in the base"
        )
    unlike = [job for job in jobs if job.tuned.type != job.base.type]
    if unlike:
        first = unlike[0]
        yield (
            f"{len(unlike)} tensors have unlike types ({first.target}: "
            f"{type_name(lib, first.tuned.type)} and {type_name(lib, first.base.type)}): their "
            "rounding is part of the difference; two models of one type, best f16, give less of it"
        )
