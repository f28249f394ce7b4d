"""Model families by `general.architecture`. To add one: write its file, name it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loragraph.errors import UnsupportedError
from loragraph.ggml.handles import Tensor
from loragraph.graph.arch.llama import Llama
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams
from loragraph.model.weights import Weights


class Family(Protocol):
    """What a family's file offers."""

    rope_mode: int

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        """Asks `weights` for every tensor of the family, by name and shape."""

    def build(self, b: Builder) -> Tensor:
        """The graph, top to bottom; gives the logits F32 [n_vocab, n_outputs]."""


FAMILIES: Mapping[str, type[Family]] = {"llama": Llama}


def family_of(arch: str) -> type[Family]:
    """The family's class; UnsupportedError names those there are and how to add one."""
    if arch not in FAMILIES:
        raise UnsupportedError(
            f"architecture '{arch}' is not supported; supported: {', '.join(sorted(FAMILIES))}",
            what=f"architecture {arch}",
            hint="a family is one file, see CONTRIBUTING.md",
        )
    return FAMILIES[arch]
