"""Integers between bounds as GBNF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragraph.errors import InvalidRequestError

MAX_DIGITS = 16


def integer_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the greatest integer that a schema's keywords allow; None: no bound."""
    lows = [
        _floor(schema, "minimum", up=True, inside=False),
        _floor(schema, "exclusiveMinimum", up=True, inside=True),
    ]
    highs = [
        _floor(schema, "maximum", up=False, inside=False),
        _floor(schema, "exclusiveMaximum", up=False, inside=True),
    ]
    return (
        max((low for low in lows if low is not None), default=None),
        min((high for high in highs if high is not None), default=None),
    )


def _floor(schema: Mapping[str, Any], keyword: str, *, up: bool, inside: bool) -> int | None:
    """The integer nearest to a bound on its inner side; `inside`: never the bound itself."""
    value = schema.get(keyword)
    if value is None:
        return None
    # written so that NaN, which nothing is at most, is refused
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise InvalidRequestError(
            f"JSON schema: {keyword!r}: expected a number as bound, got {value!r:.40}",
            param="json_schema",
        )
    floor = int(value // 1)
    whole = value == floor
    if up:
        return floor if whole and not inside else floor + 1
    return floor - 1 if whole and inside else floor


def integer_rule(low: int | None, high: int | None) -> str:
    """GBNF of the integers in [low, high]; None: no bound. It may use `digits`: any natural."""
    limit = 10**MAX_DIGITS - 1
    least = -limit if low is None else max(low, -limit)
    most = limit if high is None else min(high, limit)
    if least > most:
        raise InvalidRequestError(
            f"JSON schema: no integer lies from {low} to {high}", param="json_schema"
        )
    parts = []
    if least < 0:
        below = _naturals(max(1, -most), -least)
        parts.append(f'"-" ({below})')
    if most >= 0:
        parts.append(_naturals(max(0, least), most))
    return " | ".join(parts)


def _naturals(low: int, high: int) -> str:
    """Alternatives for [low, high], both at least 0: one length of digits after the other."""
    if low == 0 and high == 10**MAX_DIGITS - 1:
        return "digits"
    parts = []
    for n in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (n - 1) if n > 1 else 0)
        last = min(high, 10**n - 1)
        parts += _same_length(str(first), str(last))
    return " | ".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Alternatives for numbers of as many digits as both have, from `low` to `high`."""
    if low == high:
        return [f'"{low}"']
    if len(low) == 1:
        return [f"[{low}-{high}]"]
    rest = len(low) - 1
    if low[0] == high[0]:
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):  # the first digit's upper part only
        parts.append(f'"{first}" ({" | ".join(_same_length(low[1:], "9" * rest))})')
        first += 1
    tail = []
    if high[1:].strip("9"):
        tail.append(f'"{last}" ({" | ".join(_same_length("0" * rest, high[1:]))})')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return parts + tail
