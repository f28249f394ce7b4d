"""Integers between bounds as GBNF."""

from __future__ import annotations

from loragraph.errors import InvalidRequestError

MAX_DIGITS = 16


def integer_rule(low: int | float | None, high: int | float | None) -> str:
    """GBNF of the integers in [low, high]; None: no bound. It may use `digits`: any natural."""
    least, most = _bound(low, up=True), _bound(high, up=False)
    limit = 10**MAX_DIGITS - 1
    least = -limit if least is None else max(least, -limit)
    most = limit if most is None else min(most, limit)
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


def _bound(value: object, *, up: bool) -> int | None:
    """The nearest integer inside."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise InvalidRequestError(
            f"JSON schema: expected a number as bound, got {value!r:.40}", param="json_schema"
        )
    floor = int(value // 1)
    return floor + 1 if up and value != floor else floor


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
