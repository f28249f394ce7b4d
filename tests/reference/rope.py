"""Rotary positions in float64: plain, with frequency factors, linear, longrope and YaRN scaling.

Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071) with beta_fast 32 and beta_slow 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Float: TypeAlias = npt.NDArray[np.float64]

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True)
class Rope:
    """What the rotation needs; `pairs` says which two components turn together."""

    n_rot: int
    freq_base: float = 10000.0
    freq_factors: Float | None = None  # (n_rot / 2,), divide the angle
    scaling: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    pairs: Literal["norm", "neox"] = "norm"  # (2i, 2i + 1) or (i, i + n_rot / 2)

    @classmethod
    def from_metadata(
        cls, keys: Mapping[str, object], head_dim: int, freq_factors: Float | None
    ) -> Rope:
        """From GGUF keys; the architecture is the prefix."""
        arch = keys["general.architecture"]
        scaling = keys.get(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear", "yarn", "longrope"):
            raise ValueError(f"{arch}.rope.scaling.type: unknown value {scaling!r}")

        def number(name: str, default: float) -> float:
            return float(str(keys.get(f"{arch}.{name}", default)))

        return cls(
            n_rot=int(number("rope.dimension_count", head_dim)),
            freq_base=number("rope.freq_base", 10000.0),
            freq_factors=freq_factors,
            scaling=scaling,
            # Without a factor nothing is scaled, whatever the type says.
            factor=number("rope.scaling.factor", 0.0) or 1.0,
            n_ctx_orig=int(
                number("rope.scaling.original_context_length", number("context_length", 0))
            ),
            attn_factor=number("rope.scaling.attn_factor", 1.0),
        )

    def angles(self, n_tokens: int) -> Float:
        """Angle (n_tokens, n_rot / 2) of each pair at positions 0, 1, ..."""
        i = np.arange(self.n_rot // 2)
        frequency = self.freq_base ** (-2 * i / self.n_rot)
        if self.freq_factors is not None:
            frequency = frequency / self.freq_factors
        if self.scaling in ("linear", "longrope"):
            frequency = frequency / self.factor
        if self.scaling == "yarn":
            keep = self._kept(i)
            frequency = frequency * keep + frequency / self.factor * (1 - keep)
        out: Float = np.arange(n_tokens)[:, None] * frequency
        return out

    def _kept(self, i: npt.NDArray[np.int_]) -> Float:
        """Share of the unscaled frequency: 1 for fast pairs, 0 for slow ones, a ramp between."""
        low = max(0, math.floor(self._pair_with_turns(_BETA_FAST)))
        high = min(self.n_rot - 1, math.ceil(self._pair_with_turns(_BETA_SLOW)))
        ramp = np.clip((i - low) / max(0.001, high - low), 0, 1)
        out: Float = 1 - ramp
        return out

    def _pair_with_turns(self, n_turns: float) -> float:
        """The (fractional) pair that makes `n_turns` within the original context."""
        wavelengths = self.n_ctx_orig / (n_turns * 2 * math.pi)
        return self.n_rot * math.log(wavelengths) / (2 * math.log(self.freq_base))

    @property
    def magnitude(self) -> float:
        """Factor on the rotated vector: YaRN's attention temperature, times attn_factor."""
        is_yarn = self.scaling == "yarn" and self.factor > 1
        return self.attn_factor * (1 + 0.1 * math.log(self.factor) if is_yarn else 1.0)

    def rotate(self, x: Float) -> Float:
        """Rotate x (n_tokens, n_heads, head_dim); components from n_rot on pass through."""
        angle = self.angles(len(x))[:, None, :]
        cos, sin = np.cos(angle) * self.magnitude, np.sin(angle) * self.magnitude
        if self.pairs == "norm":
            first, second = slice(0, self.n_rot, 2), slice(1, self.n_rot, 2)
        else:
            first, second = slice(0, self.n_rot // 2), slice(self.n_rot // 2, self.n_rot)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out
