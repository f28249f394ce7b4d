"""What a family's file offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loragraph.ggml.handles import Tensor
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams
from loragraph.model.keys import Keys
from loragraph.model.weights import Weights


@dataclass(frozen=True, slots=True)
class About:
    """A family in words, for `loragraph models`: nothing else states it."""

    models: str  # whose models these are
    real: tuple[str, ...] = ()  # real models compared with libllama (scripts/bench real)
    synthetic: str = "libllama, float64"  # what tests compare its tiny random models with
    unsupported: tuple[str, ...] = ()  # variants that are refused, or what of them is left out


class Family(Protocol):
    """One architecture; its class has the static method `read_hparams(keys) -> HParams`."""

    about: About
    hparams: HParams

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """The family's numbers from a header; GGUFError for what is missing or absurd."""

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        """Asks `weights` for every tensor of the family, by name and shape."""

    def build(self, b: Builder) -> Tensor:
        """The graph, top to bottom; gives the logits F32 [n_vocab, n_outputs]."""
