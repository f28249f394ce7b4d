"""Numbers of bytes on the command line: 2G, 500M, 800MB, 1073741824."""

from __future__ import annotations

import math
import re

from loragraph.errors import ConfigError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def byte_count(text: str, flag: str) -> int:
    """Bytes of a number with an optional unit: K, M, G, T (powers of 1,000), Ki, Mi, Gi, Ti."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    unit = match[2].upper() if match else ""
    if match is None or (match[3] and not unit):
        raise ConfigError(
            f"expected a number of bytes such as 500M, 2G or 1.5Gi, got {text!r}", field=flag
        )
    value = float(match[1]) * (_BINARY if match[3] else _UNITS)[unit]
    if not 1 <= value < 2**63 or not math.isfinite(value):
        raise ConfigError(f"expected at least one byte, got {text!r}", field=flag)
    return int(value)
