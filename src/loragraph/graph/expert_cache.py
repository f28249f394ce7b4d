"""Where the base product of experts reads its matrices: the model's own stack, or a cache of some.

A cache holds the experts that were used last in fewer slots than there are experts. The base
product reads by slot; scales, biases and low-rank parts keep the experts' own ids.
"""

from __future__ import annotations

from typing import Protocol

from loragraph.ggml.handles import Tensor
from loragraph.ggml.ops import Ops
from loragraph.model.weights import Weight


class ExpertCache(Protocol):
    """Part of one graph at a time, like a lowering."""

    def experts(self, ops: Ops, w: Weight, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The stack [n_in, n_out, n_slots] and the slots I32 [n_used, n] of w's experts `ids`.

        The nodes that fill the slots must be sources of the slots' tensor, so that they run first.
        """

    def bind(self) -> None:
        """Called once the graph has memory: addresses of its tensors are final."""


class WholeStacks:
    """No cache: an expert's slot is its id."""

    def experts(self, ops: Ops, w: Weight, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The weight itself and the ids themselves."""
        return w.tensor, ids

    def bind(self) -> None:
        """Nothing to bind."""
