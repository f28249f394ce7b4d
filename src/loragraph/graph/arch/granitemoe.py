"""general.architecture = granitemoe: Granite 3 MoE, with or without a shared expert.

Granite whose feed-forward is a mixture of experts; its positions always count.
"""

from __future__ import annotations

from dataclasses import replace

from loragraph.graph.arch.family import About
from loragraph.graph.arch.granite import Granite
from loragraph.model.hparams import HParams
from loragraph.model.keys import Keys


class GraniteMoE(Granite):
    """Granite's tensors and graph, with experts."""

    about = About(models="Granite 3 MoE (1B-A400M, 3B-A800M), Granite 4 without state-space layers")

    @staticmethod
    def read_hparams(keys: Keys) -> HParams:
        """Granite's keys, among which the experts' must be."""
        hparams = Granite.read_hparams(keys)
        if hparams.experts is None:
            raise keys.error("expected at least 1, got none", "expert_count")
        return replace(hparams, has_positions=True)
