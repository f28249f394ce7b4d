"""How strong an adapter is: PEFT's rule for each module, and one alpha for a GGUF file.

PEFT: scale = alpha / rank, or alpha / sqrt(rank) with use_rslora; rank and alpha come from the
first key of rank_pattern or alpha_pattern that matches the module's path as `(.*\\.)?(KEY)$`.
GGUF: scale = alpha / rank with one alpha a file, so what is left goes into lora_B.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import regex

from loragraph.adapters.convert.config import AdapterConfig
from loragraph.errors import AdapterFormatError

_MATCH_SECONDS = 0.5  # a pattern comes from a file, and can be made to run for ever


def pattern_value(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """The number of the first key that matches `module`, else `default`.

    AdapterFormatError for a key that is no regular expression, or that takes too long.
    """
    for key, value in (pattern or {}).items():
        if module == key or module.endswith(f".{key}"):
            return value
        try:
            found = regex.match(rf"(.*\.)?({key})$", module, timeout=_MATCH_SECONDS)
        except TimeoutError as exc:
            raise AdapterFormatError(f"the pattern {key!r:.80} takes too long to match") from exc
        except (regex.error, RecursionError, MemoryError, OverflowError) as exc:
            raise AdapterFormatError(f"{key!r:.80} is no regular expression: {exc}") from exc
        if found:
            return value
    return default


def module_scale(config: AdapterConfig, module: str, rank: int) -> float:
    """The effective scale of a module whose lora_A has `rank` rows."""
    if config.source == "mlx":
        return config.alpha
    wanted = pattern_value(config.rank_pattern, module, config.rank)
    if wanted != rank:
        raise AdapterFormatError(
            f"{module}: the configuration says rank {wanted:g}, lora_A has {rank} rows",
            hint="weights and adapter_config.json are not of the same training",
        )
    alpha = pattern_value(config.alpha_pattern, module, config.alpha)
    return alpha / math.sqrt(rank) if config.rslora else alpha / rank


def common_alpha(scaled: Iterable[tuple[float, int]]) -> float:
    """The alpha that leaves most of the given (scale, rank) without a factor; f32, not 0."""
    wanted = Counter(float(np.float32(scale * rank)) for scale, rank in scaled)
    best = max(wanted, key=lambda alpha: (wanted[alpha], alpha), default=1.0)
    return best if best != 0 and math.isfinite(best) else 1.0


def left_over(alpha: float, scale: float, rank: int) -> float:
    """What lora_B must be multiplied with so that alpha / rank gives `scale`; 1 where exact."""
    read = float(np.float32(alpha) / np.float32(rank))
    factor = scale / read
    return 1.0 if abs(factor - 1) < 1e-7 else factor
