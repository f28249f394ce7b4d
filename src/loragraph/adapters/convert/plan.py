"""The plan of a conversion: which targets come of which modules, with what scale, and why.

Made from headers alone, so --dry-run shows it without reading a value; `write` carries it out.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, TargetKind
from loragraph.adapters.checks import MAX_RANK
from loragraph.adapters.convert.config import AdapterConfig, looks_like_path
from loragraph.adapters.convert.facts import BaseFacts
from loragraph.adapters.convert.modules import Module, modules_of
from loragraph.adapters.convert.names import Names, Part
from loragraph.adapters.convert.pieces import Piece, PieceMaker, VectorPiece
from loragraph.adapters.convert.scale import common_alpha, left_over
from loragraph.adapters.convert.source import AdapterSource
from loragraph.adapters.convert.trained import TrainedMaker
from loragraph.adapters.report import coverage
from loragraph.errors import AdapterFormatError, AdapterMismatchError, UnsupportedError

_CACHED_TENSORS = 4  # experts read the same two again and again


@dataclass(frozen=True)
class PlannedTarget:
    """One pair of the file to come, or vectors without one, and what they are made of."""

    target: str
    kind: TargetKind
    ne: tuple[int, int, int]  # of the base's weight: n_in, n_out, n_expert
    rank: int  # 0: no pair
    pieces: tuple[Piece, ...]
    magnitude: tuple[VectorPiece, ...] = ()
    bias: tuple[VectorPiece, ...] = ()
    delta: tuple[VectorPiece, ...] = ()  # of a norm

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it comes of, each once."""
        parts: tuple[Piece | VectorPiece, ...] = self.pieces or (*self.bias, *self.delta)
        return tuple(dict.fromkeys(piece.module for piece in parts))

    @property
    def scales(self) -> tuple[float, ...]:
        """The effective scales of its pieces at user scale 1, each once."""
        return tuple(dict.fromkeys(piece.scale for piece in self.pieces))

    @property
    def shape_a(self) -> tuple[int, ...]:
        """Shape of lora_a, numpy order."""
        n_in, n_out, n_expert = self.ne
        if self.kind is TargetKind.EMBEDDING:
            return (n_out, self.rank)
        return (n_expert, self.rank, n_in) if n_expert > 1 else (self.rank, n_in)

    @property
    def shape_b(self) -> tuple[int, ...]:
        """Shape of lora_b, numpy order."""
        n_in, n_out, n_expert = self.ne
        if self.kind is TargetKind.EMBEDDING:
            return (n_in, self.rank)
        return (n_expert, n_out, self.rank) if n_expert > 1 else (n_out, self.rank)

    @property
    def n_rows(self) -> int:
        """Length of a magnitude, a bias or a norm's change."""
        along_row = self.kind is TargetKind.EMBEDDING or bool(self.delta)
        return self.ne[0] if along_row else self.ne[1]

    @property
    def n_params(self) -> int:
        """Values of all its tensors."""
        vectors = sum(self.n_rows for part in (self.magnitude, self.bias, self.delta) if part)
        return vectors + (_size(self.shape_a) + _size(self.shape_b) if self.rank else 0)


@dataclass(frozen=True)
class Plan:
    """All of a conversion before any value was read."""

    source: Path
    base: BaseFacts
    config: AdapterConfig
    targets: tuple[PlannedTarget, ...]
    alpha: float
    tied_output: bool | None  # None: no pair of a tied table, so the key is not written
    skipped: tuple[str, ...]  # tensors that were saved but not trained
    warnings: tuple[str, ...]

    @property
    def own_keys(self) -> tuple[str, ...]:
        """What llama.cpp has no field for, and so refuses to load."""
        own = ("lora_magnitude", "magnitude"), ("lora_bias", "bias"), ("lora_delta", "delta")
        return tuple(key for key, name in own if any(getattr(t, name) for t in self.targets))

    @property
    def llama_cpp(self) -> str:
        """Why llama.cpp cannot load the file, "" where it can."""
        if self.own_keys:
            return f"it has no field for {' and '.join(self.own_keys)}"
        names = {target.target for target in self.targets}
        if self.base.info.tied and OUTPUT in names:
            return "it cannot change a tied head alone"
        if self.base.info.tied and TOKEN_EMBD in names:
            return "it ends the process on a pair of a tied token table"
        return ""

    def factor(self, target: PlannedTarget, piece: Piece | VectorPiece) -> float:
        """What is folded into a piece of lora_b (or a bias), so that alpha / rank is right."""
        if not target.rank:
            return piece.scale
        return left_over(self.alpha, piece.scale, target.rank)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        info = self.base.info
        return {
            "source": str(self.source),
            "format": self.config.source,
            "base": {"architecture": info.arch, "name": info.name, "tied": info.tied},
            "alpha": self.alpha,
            "invocation_tokens": list(self.config.invocation_tokens),
            "tied_output": self.tied_output,
            "targets": [self._target(target) for target in self.targets],
            "coverage": {
                kind: {"changed": changed, "in_base": total}
                for kind, (changed, total) in coverage(
                    (target.target for target in self.targets), info
                ).items()
            },
            "n_params": sum(target.n_params for target in self.targets),
            "own_keys": list(self.own_keys),
            "llama_cpp": self.llama_cpp or "loads it",
            "skipped": list(self.skipped),
            "warnings": list(self.warnings),
        }

    def _target(self, target: PlannedTarget) -> dict[str, Any]:
        factors = dict.fromkeys(self.factor(target, piece) for piece in target.pieces)
        return {
            "target": target.target,
            "modules": list(target.modules[:8]),
            "n_modules": len(target.modules),
            "rank": target.rank,
            "scales": list(target.scales),
            "folded": list(factors),
            "lora_a": list(reversed(target.shape_a)) if target.rank else [],
            "lora_b": list(reversed(target.shape_b)) if target.rank else [],
            "method": target.pieces[0].method if target.pieces else "vector",
            "magnitude": bool(target.magnitude),
            "bias": bool(target.bias),
            "delta": bool(target.delta),
        }


def make_plan(source: AdapterSource, base: BaseFacts, config: AdapterConfig) -> Plan:
    """Checks an adapter against a base and decides how it becomes a GGUF file."""
    if config.alpha == 0:
        raise AdapterFormatError(
            "lora_alpha is 0: the adapter would change nothing", path=source.folder
        )
    _check_base(base, config)
    names = Names(base)
    read = functools.lru_cache(_CACHED_TENSORS)(source.values)
    lowrank = PieceMaker(base, names, config, read)
    trained = TrainedMaker(base, names, config, read)
    modules = modules_of(source.folder, source.tensors, config)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    magnitudes: dict[str, list[VectorPiece]] = defaultdict(list)
    biases: dict[str, list[VectorPiece]] = defaultdict(list)
    deltas: dict[str, list[VectorPiece]] = defaultdict(list)
    for module in modules:
        if trained.is_norm(module):
            for vector in trained.norm(module):
                deltas[vector.place.target].append(vector)
            continue
        pairs = _pairs(module, lowrank, trained)
        for piece in pairs:
            pieces[piece.place.target].append(piece)
        for vector in lowrank.vectors(module, Part.MAGNITUDE):
            magnitudes[vector.place.target].append(vector)
        added = lowrank.vectors(module, Part.B_BIAS)
        if Part.FULL_BIAS in module.parts:
            added += trained.bias(module, pairs)
        for vector in added:
            biases[vector.place.target].append(vector)
    targets = tuple(
        _planned(base, name, pieces[name], magnitudes[name], biases[name], deltas[name])
        for name in sorted(pieces.keys() | biases.keys() | deltas.keys(), key=_natural)
    )
    if not targets:
        raise AdapterFormatError(
            "it holds nothing that was trained: would change nothing", path=source.folder
        )
    return Plan(
        source.folder,
        base,
        config,
        targets,
        common_alpha((piece.scale, target.rank) for target in targets for piece in target.pieces),
        _tied_output(base, config, targets),
        tuple(trained.skipped),
        (*config.warnings, *lowrank.warnings, *_warnings(base, config, trained.skipped)),
    )


def _pairs(module: Module, lowrank: PieceMaker, trained: TrainedMaker) -> list[Piece]:
    pairs = lowrank.lowrank(module) if module.lowrank else []
    if Part.TOKENS in module.parts:
        pairs = [*pairs, *trained.tokens(module)]
    if Part.FULL in module.parts:
        pairs = [*pairs, *trained.weight(module)]
    return pairs


def _planned(
    base: BaseFacts,
    name: str,
    pieces: Sequence[Piece],
    magnitude: Sequence[VectorPiece],
    bias: Sequence[VectorPiece],
    delta: Sequence[VectorPiece],
) -> PlannedTarget:
    target = base.info.targets[name]
    methods = {piece.method for piece in pieces}
    if len(methods) > 1:
        raise UnsupportedError(
            f"{name}: it was trained in several ways: {', '.join(sorted(methods))}",
            what="several ways of training for one weight",
            hint="merge it in PEFT (merge_and_unload) and convert the whole model",
        )
    rank = _total_rank(pieces)
    if rank > MAX_RANK:
        raise UnsupportedError(f"{name}: rank {rank} is above {MAX_RANK}", what=f"rank {rank}")
    n_rows = target.ne[0] if target.kind is TargetKind.EMBEDDING else target.ne[1]
    covered = sum(vector.place.n_rows for vector in magnitude)
    if magnitude and covered != n_rows:
        raise UnsupportedError(
            f"{name}: DoRA was trained for {covered} of the {n_rows} rows of this fused weight",
            what="DoRA of a part of a fused weight",
            hint="merge it in PEFT (merge_and_unload) and convert the whole model",
        )
    return PlannedTarget(
        name,
        target.kind,
        target.ne[:3],
        rank,
        tuple(pieces),
        tuple(magnitude),
        tuple(bias),
        tuple(delta),
    )


def _total_rank(pieces: Iterable[Piece]) -> int:
    """Ranks add up within one matrix; a stack of experts has the largest of them."""
    by_expert: dict[int | None, int] = defaultdict(int)
    for piece in pieces:
        by_expert[piece.place.expert] += piece.rank
    return max(by_expert.values(), default=0)


def _tied_output(
    base: BaseFacts, config: AdapterConfig, targets: Sequence[PlannedTarget]
) -> bool | None:
    """Whether the table's pair changes the tied head too: a fact of the training.

    PEFT trains the lookup alone, but for ensure_weight_tying and for trained tokens, which it
    always ties; MLX applies a table's adapter as a head too.
    """
    table = next((target for target in targets if target.target == TOKEN_EMBD), None)
    if table is None or not base.info.tied:
        return None
    if any(target.target == OUTPUT for target in targets):
        return False
    trains_tokens = table.pieces[0].method == "tokens"
    return config.ties_head or config.source == "mlx" or trains_tokens


def _check_base(base: BaseFacts, config: AdapterConfig) -> None:
    if config.n_layer is not None and config.n_layer != base.n_layer:
        raise AdapterMismatchError(
            f"layer_replication made a model of {config.n_layer} layers, the base has "
            f"{base.n_layer}",
            hint="make a base whose layers are repeated likewise, and convert for that",
        )
    n_vocab = base.info.targets[TOKEN_EMBD].ne[1] if TOKEN_EMBD in base.info.targets else 0
    if config.invocation_tokens and max(config.invocation_tokens) >= n_vocab:
        raise AdapterMismatchError(
            f"alora_invocation_tokens: the base has {n_vocab} tokens, got "
            f"{max(config.invocation_tokens)}",
            hint="was it made for another base model?",
        )


def _warnings(base: BaseFacts, config: AdapterConfig, skipped: Sequence[str]) -> Iterable[str]:
    if skipped:
        yield (
            f"{len(skipped)} tensors were saved but not trained (modules_to_save does not name "
            f"them): {', '.join(skipped[:3])}"
        )
    trained, own = config.base_name, base.names
    if trained and not looks_like_path(trained) and own and not _alike(trained, own):
        yield f"it was trained on '{trained[:100]}', the base calls itself '{own[0][:100]}'"


def _alike(trained: str, own: Iterable[str]) -> bool:
    """Whether two names may mean one model: one's letters and digits begin with the other's."""
    wanted = _plain(re.sub(r"-(bnb-4bit|GPTQ|AWQ)$", "", trained.rsplit("/", 1)[-1]))
    return any(
        wanted.startswith(_plain(name)) or _plain(name).startswith(wanted)
        for name in own
        if _plain(name)
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blk.2 before blk.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
