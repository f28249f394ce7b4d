"""The set of adapters that a token carries, with a scale each: canonical, hashable, immutable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.errors import InvalidRequestError


class Mix:
    """Adapters with user scales in canonical form; the empty mix is the base model.

    Canonical: ordered by digest, scales f32, those of equal digests summed, zeros dropped. So equal
    mixes have equal keys, and the order of summation does not depend on who was registered first.
    """

    __slots__ = ("_hash", "items", "key")

    def __init__(self, scales: Mapping[Adapter, float] | None = None) -> None:
        """InvalidRequestError where a scale, or a sum of scales, is no finite f32."""
        grouped: dict[str, tuple[Adapter, list[float]]] = {}
        for adapter, scale in (scales or {}).items():
            grouped.setdefault(adapter.digest, (adapter, []))[1].append(_number(scale))
        summed = (
            # fsum rounds once, so the order of equal digests does not matter.
            (adapter, _as_f32(math.fsum(parts)))
            for _, (adapter, parts) in sorted(grouped.items(), key=lambda item: item[0])
        )
        self.items: tuple[tuple[Adapter, float], ...] = tuple(
            (adapter, scale) for adapter, scale in summed if scale != 0
        )
        self.key: tuple[tuple[str, float], ...] = tuple(
            (adapter.digest, scale) for adapter, scale in self.items
        )
        self._hash = hash(self.key)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters in canonical order."""
        return tuple(adapter for adapter, _ in self.items)

    def __iter__(self) -> Iterator[tuple[Adapter, float]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Mix) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        inside = ", ".join(f"{digest[:8]}: {scale:g}" for digest, scale in self.key)
        return f"Mix({{{inside}}})"


EMPTY_MIX = Mix()
"""The base model."""


def _number(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.floating):
        raise InvalidRequestError(f"expected a number as scale, got {scale!r}", param="scale")
    try:
        value = float(scale)
    except OverflowError:  # an int beyond f64
        value = math.inf
    if not math.isfinite(value):
        raise InvalidRequestError(f"expected a finite scale, got {scale}", param="scale")
    return _as_f32(value)


def _as_f32(scale: float) -> float:
    with np.errstate(over="ignore"):
        value = float(np.float32(scale))
    if not math.isfinite(value):
        raise InvalidRequestError(f"expected a scale within f32, got {scale}", param="scale")
    return value
