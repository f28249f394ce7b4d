"""What the adapter checks need to know of a base model: names, shapes and kinds. Pure data.

Comes from the header of a GGUF file, or from a loaded model; weights are never read here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from loragraph.errors import FormatError
from loragraph.ggml.gguf import GGUFFile
from loragraph.model.fold import latent_tables

Shape = tuple[int, int, int, int]

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"

_LOOKUPS_AND_HEADS = frozenset(  # 2-D weights that no graph passes through a low-rank seam
    {
        "position_embd.weight",
        "token_types.weight",
        "cls.weight",
        "cls.output.weight",
        "dense_2.weight",
        "dense_3.weight",
    }
)


_STACKS = ("_exps.weight", ".attn_k_b.weight", ".attn_v_b.weight")
"""Endings of stacks: a matrix an expert, or in latent attention a matrix a head."""

_SHARED_GATE = ".ffn_gate_inp_shexp.weight"  # one row: the weight of the shared expert


class TargetKind(Enum):
    """How a base tensor meets activations, and so which low-rank form fits it."""

    LINEAR = "linear"  # W [n_in, n_out]: A [n_in, rank], B [rank, n_out]
    EXPERTS = "experts"  # W [n_in, n_out, n_expert or n_head]: A and B with the same ne[2]
    EMBEDDING = "embedding"  # W [n_embd, n_vocab]: A [rank, n_vocab], B [rank, n_embd]
    NONE = "none"  # norms, biases, frequencies, …: no low-rank part applies


@dataclass(frozen=True, slots=True)
class BaseTarget:
    """One tensor of the base model."""

    name: str
    ne: Shape  # ggml order
    kind: TargetKind
    repacked: bool = False  # stands in a buffer that adapters cannot share

    @property
    def n_params(self) -> int:
        """Number of values."""
        return math.prod(self.ne)


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base model as the adapter checks see it.

    On a tied base (no output.weight of its own: the head is token_embd) `targets` still holds
    "output.weight", LINEAR with token_embd's ne, because an adapter may change the head alone.
    """

    arch: str
    name: str
    targets: Mapping[str, BaseTarget]
    tied: bool
    latent: frozenset[str] = frozenset()  # lookup tables whose rows are rotated
    path: Path | None = None  # its file, or one of them: folders of PEFT are converted for it

    @property
    def n_params(self) -> int:
        """Number of values in the base's file; a tied head counts once."""
        borrowed = OUTPUT if self.tied else ""
        return sum(target.n_params for name, target in self.targets.items() if name != borrowed)


def target_kind(name: str, ne: Shape) -> TargetKind:
    """The kind of a base tensor by its GGUF name and shape."""
    n_in, n_out, n_expert, n_outer = ne
    if not name.endswith(".weight") or name.endswith("_norm.weight") or n_outer != 1:
        return TargetKind.NONE
    if name == TOKEN_EMBD:
        return TargetKind.EMBEDDING
    if name.endswith(_STACKS):
        return TargetKind.EXPERTS
    if name.endswith(_SHARED_GATE):
        return TargetKind.LINEAR
    if name in _LOOKUPS_AND_HEADS or n_in == 1 or n_out == 1:
        return TargetKind.NONE
    return TargetKind.LINEAR if n_expert == 1 else TargetKind.NONE


def base_info(
    arch: str, name: str, shapes: Mapping[str, Shape], repacked: Collection[str] = ()
) -> BaseInfo:
    """The base with these tensors (name -> ne); `repacked` names those in a repack buffer."""
    tied = OUTPUT not in shapes and TOKEN_EMBD in shapes
    targets = {
        tensor: BaseTarget(tensor, ne, target_kind(tensor, ne), tensor in repacked)
        for tensor, ne in shapes.items()
    }
    if tied:
        head = shapes[TOKEN_EMBD]
        targets[OUTPUT] = BaseTarget(OUTPUT, head, TargetKind.LINEAR, OUTPUT in repacked)
    return BaseInfo(arch, name, MappingProxyType(dict(sorted(targets.items()))), tied)


def base_info_from_gguf(file: GGUFFile, *parts: GGUFFile) -> BaseInfo:
    """The base in `file`; `parts` are the further files of a split one. No weight is read."""
    kind = file.string("general.type", "model")
    if kind != "model":
        raise FormatError(
            f"expected a base model, got a GGUF file of type '{kind}'", path=file.path
        )
    shapes: dict[str, Shape] = {}
    for part in (file, *parts):
        for name, info in part.tensors.items():
            if name in shapes:
                raise FormatError(f"tensor '{name}' stands in two files", path=part.path)
            shapes[name] = info.ne
    arch = file.string("general.architecture")
    base = base_info(arch, file.string("general.name", file.path.stem), shapes)
    return replace(base, latent=latent_tables(file), path=file.path)
