"""What a base and its adapters cost: memory by layer and whole, work and traffic a token, and how
many adapters fit a budget. From headers alone; no weight is read.

A matrix of n_in by n_out costs n_in · n_out multiply-adds a token, an adapter of rank r on it r
(n_in + n_out); of an expert stack a token uses n_expert_used parts; a lookup reads one row of the
table, and of its adapter one row of A and all of B. Bytes a token are those of one decode step of a
single sequence: each weight and each adapter read once; a batch shares them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loragraph.adapters.adapter import ALIGNMENT
from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo, BaseTarget, TargetKind
from loragraph.adapters.checks import MAX_RANK
from loragraph.adapters.gguf import memory_of, read_header
from loragraph.engine.options import integer
from loragraph.errors import GGUFError
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.handles import F16, F32, Q8_0
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.quants import row_bytes
from loragraph.model.files import ModelFiles
from loragraph.tools.merge import Paths, base_of

KV_TYPES: Mapping[str, int] = {"f16": F16, "f32": F32, "q8_0": Q8_0}
_IN_LAYER = re.compile(r"^blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a set of tensors costs; bytes as stored."""

    name: str
    params: int
    params_layers: int  # of them inside the layers
    nbytes: int
    nbytes_layers: int
    macs: int  # multiply-adds a token
    bytes_token: int  # bytes read for one token alone
    n_targets: int
    ranks: tuple[int, int] = (0, 0)  # smallest and largest; 0 for the base


@dataclass(frozen=True, slots=True)
class Plan:
    """The costs of a base, of adapters, and what fits a budget."""

    base: Cost  # matrices, lookups and experts
    base_bytes: int  # all tensors of the base
    n_layer: int
    tied: bool
    adapters: Sequence[Cost]
    n_ctx: int
    bytes_cell: int
    budget_bytes: int  # 0 = none given

    @property
    def cells_bytes(self) -> int:
        """K and V of `n_ctx` tokens."""
        return self.n_ctx * self.bytes_cell

    @property
    def left_bytes(self) -> int:
        """What the budget leaves for adapters; negative where base and cells do not fit."""
        return self.budget_bytes - self.base_bytes - self.cells_bytes

    def fitting(self, adapter: Cost) -> int:
        """How many adapters of this size fit beside base and cells."""
        return max(0, self.left_bytes) // adapter.nbytes

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, shares and what fits included."""
        facts: dict[str, Any] = {
            "base": asdict(self.base),
            "base_bytes": self.base_bytes,
            "n_layer": self.n_layer,
            "tied": self.tied,
            "n_ctx": self.n_ctx,
            "bytes_cell": self.bytes_cell,
            "cells_bytes": self.cells_bytes,
            "adapters": [self._adapter(adapter) for adapter in self.adapters],
        }
        if self.budget_bytes:
            facts |= {"budget_bytes": self.budget_bytes, "left_bytes": self.left_bytes}
        return facts

    def _adapter(self, adapter: Cost) -> dict[str, Any]:
        facts = asdict(adapter) | {"ranks": list(adapter.ranks)}
        facts["share_params"] = adapter.params / self.base.params
        facts["share_macs"] = adapter.macs / self.base.macs
        facts["share_bytes_token"] = adapter.bytes_token / self.base.bytes_token
        if self.budget_bytes:
            facts["n_fitting"] = self.fitting(adapter)
        return facts


@dataclass(frozen=True, slots=True)
class _Use:
    """How much of a stack one token uses."""

    n_expert: int
    n_used: int

    def part(self, target: BaseTarget, amount: int) -> int:
        """`amount` of a stack of experts: the share that one token uses."""
        if target.kind is not TargetKind.EXPERTS or not self.n_expert:
            return amount
        return amount * self.n_used // target.ne[2]


def plan(
    base: Paths,
    adapters: Iterable[Paths] = (),
    *,
    ranks: Iterable[int] = (),
    budget_bytes: int = 0,
    n_ctx: int = 4096,
    kv_type: str = "f16",
    ggml_folder: Paths | None = None,
) -> Plan:
    """Costs of `adapters` (files) and of supposed F16 adapters of `ranks` on all linear weights.

    `budget_bytes` is memory for base, cells of `n_ctx` tokens and adapters together. Errors: as for
    loading, from headers; ConfigError for a wrong argument.
    """
    lib = load_library(None if ggml_folder is None else Path(ggml_folder))
    n_ctx = integer(n_ctx, "n_ctx", 1, 1 << 24)
    budget_bytes = integer(budget_bytes, "budget_bytes", 0, 1 << 62)
    supposed = [integer(rank, "rank", 1, MAX_RANK) for rank in ranks]
    with ExitStack() as stack:
        files = stack.enter_context(ModelFiles(lib, base))
        info = base_of(files)
        use = _expert_use(files.metadata)
        costs = [_adapter_cost(lib, Path(path), info, use) for path in adapters]
        costs += [_supposed_cost(rank, info, use) for rank in supposed]
        return Plan(
            base=_base_cost(files, info, use),
            base_bytes=sum(tensor.nbytes for tensor in files.tensors.values()),
            n_layer=_n_layer(files.metadata),
            tied=info.tied,
            adapters=costs,
            n_ctx=n_ctx,
            bytes_cell=_bytes_cell(lib, files.metadata, KV_TYPES[kv_type]),
            budget_bytes=budget_bytes,
        )


def _base_cost(files: ModelFiles, info: BaseInfo, use: _Use) -> Cost:
    """Of all matrices; a tied head is computed with, but stored once."""
    params = params_layers = nbytes = nbytes_layers = macs = traffic = n_targets = 0
    for name, target in info.targets.items():
        if target.kind is TargetKind.NONE:
            continue
        n_targets += 1
        tensor: TensorInfo = files.tensors.get(name) or files.tensors[TOKEN_EMBD]
        if target.kind is TargetKind.EMBEDDING:
            traffic += tensor.nbytes // target.ne[1]
        else:
            macs += use.part(target, target.n_params)
            traffic += use.part(target, tensor.nbytes)
        if name == OUTPUT and info.tied:
            continue
        params, nbytes = params + target.n_params, nbytes + tensor.nbytes
        if _IN_LAYER.match(name):
            params_layers += target.n_params
            nbytes_layers += tensor.nbytes
    return Cost("base", params, params_layers, nbytes, nbytes_layers, macs, traffic, n_targets)


def _adapter_cost(lib: Library, path: Path, info: BaseInfo, use: _Use) -> Cost:
    draft = read_header(lib, path, info)
    sizes = {}
    for name, pair in draft.pairs.items():
        assert pair.a is not None  # checked by read_header
        assert pair.b is not None
        sizes[name] = (pair.b.ne[0], pair.a.nbytes, pair.b.nbytes)
    cost = _pair_costs(path.name, sizes, info, use, memory_of(draft)[0])
    vectors = [part for pair in draft.alone.values() for part in pair.vectors]
    n_values = sum(part.n_elements for part in vectors)
    in_layers = sum(part.n_elements for part in vectors if _IN_LAYER.match(part.name))
    return replace(
        cost,
        params=cost.params + n_values,
        params_layers=cost.params_layers + in_layers,
        nbytes_layers=cost.nbytes_layers + 4 * in_layers,
        macs=cost.macs + n_values,
        bytes_token=cost.bytes_token + 4 * n_values,
        n_targets=cost.n_targets + len(draft.alone),
    )


def _supposed_cost(rank: int, info: BaseInfo, use: _Use) -> Cost:
    """An F16 adapter of every matrix inside the layers."""
    sizes = {
        name: (rank, 2 * rank * target.ne[0] * target.ne[2], 2 * rank * target.ne[1] * target.ne[2])
        for name, target in info.targets.items()
        if target.kind in (TargetKind.LINEAR, TargetKind.EXPERTS) and _IN_LAYER.match(name)
    }
    nbytes = sum(-(-half // ALIGNMENT) * ALIGNMENT for _, a, b in sizes.values() for half in (a, b))
    return _pair_costs(f"rank {rank} on all, F16", sizes, info, use, nbytes)


def _pair_costs(
    name: str, sizes: Mapping[str, tuple[int, int, int]], info: BaseInfo, use: _Use, nbytes: int
) -> Cost:
    """Of pairs (rank, bytes of A, bytes of B) by target; `nbytes` is what they take in memory."""
    params = params_layers = nbytes_layers = macs = traffic = 0
    for target_name, (rank, a_bytes, b_bytes) in sizes.items():
        target = info.targets[target_name]
        own = rank * (target.ne[0] + target.ne[1]) * target.ne[2]
        params += own
        if _IN_LAYER.match(target_name):
            params_layers += own
            nbytes_layers += a_bytes + b_bytes
        if target.kind is TargetKind.EMBEDDING:
            macs += rank * target.ne[0]
            traffic += a_bytes // target.ne[1] + b_bytes
        else:
            macs += use.part(target, own)
            traffic += use.part(target, a_bytes + b_bytes)
    ranks = [rank for rank, _, _ in sizes.values()] or [0]
    return Cost(
        name=name,
        params=params,
        params_layers=params_layers,
        nbytes=max(1, nbytes),
        nbytes_layers=nbytes_layers,
        macs=macs,
        bytes_token=traffic,
        n_targets=len(sizes),
        ranks=(min(ranks), max(ranks)),
    )


def _expert_use(metadata: GGUFFile) -> _Use:
    arch = metadata.string("general.architecture")
    return _Use(
        metadata.integer(f"{arch}.expert_count", 0),
        metadata.integer(f"{arch}.expert_used_count", 0),
    )


def _n_layer(metadata: GGUFFile) -> int:
    arch = metadata.string("general.architecture")
    return metadata.integer(f"{arch}.block_count", low=1, high=1 << 16)


def _bytes_cell(lib: Library, metadata: GGUFFile, type_: int) -> int:
    """K and V of one token in all layers."""
    arch = metadata.string("general.architecture")
    n_layer = _n_layer(metadata)
    heads = _per_layer(metadata, f"{arch}.attention.head_count", n_layer, None)
    kv_heads = _per_layer(metadata, f"{arch}.attention.head_count_kv", n_layer, heads)
    width = metadata.integer(f"{arch}.embedding_length", low=1)
    default = width // max(1, max(heads))
    k = metadata.integer(f"{arch}.attention.key_length", default)
    v = metadata.integer(f"{arch}.attention.value_length", default)
    total = 0
    for n_head in kv_heads:
        for size in (k, v):
            values = n_head * size
            total += row_bytes(lib, type_, math.ceil(values / 32) * 32) if values else 0
    return total


def _per_layer(
    metadata: GGUFFile, key: str, n_layer: int, default: Sequence[int] | None
) -> Sequence[int]:
    """An integer for all layers, or an array with one for each."""
    if metadata.type_of(key).startswith("array"):
        values = [int(value) for value in metadata.numbers(key)]
        if len(values) < n_layer or min(values) < 0:
            raise GGUFError(
                f"expected {n_layer} sizes, got {len(values)}", path=metadata.path, where=key
            )
        return values[:n_layer]
    if default is not None and key not in metadata:
        return default
    return [metadata.integer(key)] * n_layer
