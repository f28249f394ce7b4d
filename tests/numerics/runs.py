"""The same tokens through loragraph and through libllama, in the modes that tests compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.kernels.product import Layout, min_rows
from tests.oracle.libllama import Libllama

Logits: TypeAlias = npt.NDArray[np.float32]
Scales: TypeAlias = tuple[float, ...]
"""User scales of the adapters of a case, in the order of their files."""

LoweringName: TypeAlias = Literal["branch", "routed", "stacked"]
LOWERINGS: tuple[LoweringName, ...] = ("branch", "routed", "stacked")
MIXING: tuple[LoweringName, ...] = ("routed", "stacked")
"""Those that compute any mixes in one batch."""


class Mode(NamedTuple):
    """How K and V are stored and read, in loragraph's terms."""

    kv_type: Literal["f32", "f16"]
    attention: Literal["plain", "flash", "cells"]


EXACT = Mode("f32", "plain")
FLASH = Mode("f16", "flash")
DEFAULT = Mode("f16", "cells")
"""The program's own, whose attention sums in F32 and in another order than ggml's."""
LIBLLAMA_MODES = {"exact": EXACT, "flash": FLASH}
"""Those with libllama's operations in libllama's order: there bits can be equal."""
MODES = LIBLLAMA_MODES | {"default": DEFAULT}


def random_tokens(n: int, n_vocab: int = 320, seed: int = 3) -> list[int]:
    """`n` ordinary token ids of a tiny model."""
    ids: list[int] = np.random.default_rng(seed).integers(3, n_vocab, n).tolist()
    return ids


def same_base(lowering: LoweringName, weight_type: str) -> bool:
    """Whether a base's products have ggml's bits; our own sum in another order but of Q4_0."""
    if lowering == "branch":
        return True
    ours = {"Q4_1": Layout.Q4_1, "Q8_0": Layout.Q8_0, "F16": Layout.F16}
    return weight_type not in ours or not min_rows(ours[weight_type])


def open_context(model: Model, mode: Mode = EXACT, **options: Any) -> Context:
    """A small context of one thread in `mode`."""
    settings: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, **mode._asdict(), **options}
    return Context(model, **settings)


def run(
    context: Context, tokens: Sequence[int], scales: Mapping[Adapter, float], chunk: int = 0
) -> Logits:
    """Logits of a fresh sequence, `chunk` tokens a call (0: all in one)."""
    context.clear()
    context.set_adapters(scales)
    width = chunk or len(tokens)
    parts = [context.decode(tokens[i : i + width]) for i in range(0, len(tokens), width)]
    return np.concatenate(parts)


def libllama_logits(
    base: Path,
    adapters: Sequence[Path],
    cases: Sequence[Scales],
    tokens: Sequence[int],
    mode: Mode = EXACT,
    *,
    chunk: int = 0,
    **options: Any,
) -> dict[Scales, Logits]:
    """libllama's logits for each set of scales, zero meaning not attached."""
    settings = {"n_ctx": 256, **options}
    flash = mode.attention != "plain"  # libllama's own default, to compare ours with
    with Libllama(base, flash=flash, kv_type=mode.kv_type, **settings) as oracle:
        handles = [oracle.load_adapter(path) for path in adapters]
        out = {}
        for scales in cases:
            pairs = zip(handles, scales, strict=True)
            oracle.set_adapters({handle: scale for handle, scale in pairs if scale})
            out[scales] = oracle.logits(tokens, chunk or None)
        return out


def loragraph_logits(
    base: Path,
    adapters: Sequence[Path],
    cases: Sequence[Scales],
    tokens: Sequence[int],
    mode: Mode = EXACT,
    *,
    lowering: LoweringName = "branch",
    repack: bool = True,
    chunk: int = 0,
    **options: Any,
) -> dict[Scales, Logits]:
    """loragraph's logits for each set of scales."""
    with Model.load(base, n_threads=1, repack=repack) as model:
        loaded = [model.load_adapter(path) for path in adapters]
        with open_context(model, mode, lowering=lowering, **options) as context:
            return {
                scales: run(context, tokens, dict(zip(loaded, scales, strict=True)), chunk)
                for scales in cases
            }
