"""Arrivals of the simulation: Poisson, open loop, adapters drawn flat or by Zipf's law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a request: what all requests of an adapter begin with, its own, the answer's."""

    n_prefix: int = 192
    n_own: int = 64
    n_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """When, and for which adapter; -1: the base."""

    at: float
    adapter: int


@dataclass(frozen=True, slots=True)
class Burst:
    """For a while further requests come, all for one adapter."""

    start: float
    end: float
    rate: float
    adapter: int


def shares(n_adapters: int, exponent: float) -> NDArray[np.float64]:
    """The probability of each: 1 / rank^exponent; 0 is flat."""
    weights = 1.0 / np.arange(1, n_adapters + 1) ** exponent
    return np.asarray(weights / weights.sum())


def arrivals(
    rate: float,
    length_s: float,
    n_adapters: int,
    exponent: float,
    *,
    seed: int,
    base_share: float = 0.1,
    burst: Burst | None = None,
) -> list[Arrival]:
    """In order of time; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    n = int(rng.poisson(rate * length_s))
    at = rng.uniform(0, length_s, n)
    drawn = rng.choice(n_adapters, n, p=shares(n_adapters, exponent))
    drawn[rng.random(n) < base_share] = -1
    if burst is not None:
        m = int(rng.poisson(burst.rate * (burst.end - burst.start)))
        at = np.concatenate((at, rng.uniform(burst.start, burst.end, m)))
        drawn = np.concatenate((drawn, np.full(m, burst.adapter)))
    order = np.argsort(at, kind="stable")
    return [Arrival(t, a) for t, a in zip(at[order].tolist(), drawn[order].tolist(), strict=True)]
