"""Medians of a run's samples, what is asked of them, and which of a peer's forms is the better."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Samples:
    """Median, lowest and highest of the rounds of one figure."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """ValueError where there is none."""
        if not values:
            raise ValueError("samples: expected at least one value, got none")
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Target:
    """A figure (a median, or made of medians) and the bounds that are asked of it."""

    what: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool:
        """Whether it lies within the bounds, which count as within."""
        fits_low = self.low is None or self.value >= self.low
        return fits_low and (self.high is None or self.value <= self.high)

    def __str__(self) -> str:
        bounds = [f">= {self.low:g}"] if self.low is not None else []
        bounds += [f"<= {self.high:g}"] if self.high is not None else []
        unit = f" {self.unit}" if self.unit else ""
        verdict = "met" if self.met else "NOT met"
        return f"asked {self.what}: {' and '.join(bounds)}{unit}, got {self.value:.3g}: {verdict}"


def verdicts(targets: Sequence[Target]) -> str:
    """A line for each target, and how many are met."""
    n_met = sum(target.met for target in targets)
    return "\n".join([*map(str, targets), f"{n_met} of {len(targets)} targets met"])


def better(values: Mapping[str, float], *, higher: bool) -> tuple[str, float]:
    """The better of a peer's forms, by name: the one with the higher value, or the lower one."""
    name = (max if higher else min)(values, key=lambda one: values[one])
    return name, values[name]


def peers(values: Mapping[str, float]) -> dict[str, float]:
    """What others than loragraph have."""
    return {name: value for name, value in values.items() if name != "loragraph"}
