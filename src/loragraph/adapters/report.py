"""What loading an adapter found: coverage, ranks, scales, sizes, warnings. Pure data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loragraph.adapters.base import BaseInfo, TargetKind

_BLOCK = re.compile(r"^blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Facts of one load. Scales are the effective ones at user scale 1."""

    ranks: Mapping[str, int]  # per target with a pair
    scales: Mapping[str, float]  # per target
    coverage: Mapping[str, tuple[int, int]]  # per target kind: changed, in the base
    n_tensors: int  # tensors used, two a target
    n_params: int
    base_params: int  # 0 = no base was given
    nbytes: int
    alone: tuple[str, ...] = ()  # targets with a bias, or a norm's change, and no pair
    ignored: tuple[str, ...] = ()  # tensors left out because the caller said so
    warnings: tuple[str, ...] = field(default=())

    @property
    def n_targets(self) -> int:
        """Number of base tensors that the adapter changes."""
        return len(self.ranks) + len(self.alone)

    @property
    def rank_min(self) -> int:
        """Smallest rank of any target."""
        return min(self.ranks.values(), default=0)

    @property
    def rank_max(self) -> int:
        """Largest rank of any target."""
        return max(self.ranks.values(), default=0)

    @property
    def base_share(self) -> float:
        """Parameters of the adapter over those of the base; 0.0 without a base."""
        return self.n_params / self.base_params if self.base_params else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "n_tensors": self.n_tensors,
            "n_targets": self.n_targets,
            "coverage": {
                kind: {"changed": changed, "in_base": total}
                for kind, (changed, total) in self.coverage.items()
            },
            "rank_min": self.rank_min,
            "rank_max": self.rank_max,
            "ranks": dict(self.ranks),
            "alone": list(self.alone),
            "scales": dict(self.scales),
            "n_params": self.n_params,
            "base_params": self.base_params,
            "base_share": self.base_share,
            "nbytes": self.nbytes,
            "ignored": list(self.ignored),
            "warnings": list(self.warnings),
        }


def target_class(name: str) -> str:
    """The name that a target shares with those of other layers: blk.3.attn_q.weight -> attn_q."""
    return _BLOCK.sub("", name).removesuffix(".weight")


def coverage(targets: Iterable[str], base: BaseInfo | None) -> dict[str, tuple[int, int]]:
    """Per class of targets: how many of `targets`, how many the base has; 0 without a base.

    Norms, which no low-rank part changes, are counted where some target is one.
    """
    changed = Counter(target_class(name) for name in targets)
    present: Counter[str] = Counter()
    if base is not None:
        present.update(
            target_class(name)
            for name, target in base.targets.items()
            if target.kind is not TargetKind.NONE or target_class(name) in changed
        )
    return {name: (changed[name], present[name]) for name in sorted(changed | present)}
