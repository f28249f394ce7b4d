"""Golden files: what PEFT computes for fixed cases, as an .npz of arrays and a .json about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # train_mlx.py runs where PEFT is not installed
    from peft import PeftModel

MAGIC = "loragraph-golden"
VERSION = 1


@dataclass(frozen=True)
class Case:
    """One set of adapters: {adapter name: user scale}; empty = the base."""

    name: str
    mix: Mapping[str, float]


def set_scales(model: PeftModel, mix: Mapping[str, float]) -> None:
    """Multiply alpha / rank of each adapter by its user scale, in every layer that has it."""
    for module in model.modules():
        if hasattr(module, "lora_alpha"):
            for adapter, scale in mix.items():
                module.set_scale(adapter, scale)


@contextmanager
def applied(model: PeftModel, mix: Mapping[str, float]) -> Iterator[None]:
    """Let `model` compute y = W x + sum_i s_i alpha_i / rank_i B_i A_i x inside the block."""
    if not mix:
        with model.disable_adapter():
            yield
        return
    model.base_model.set_adapter(list(mix))
    set_scales(model, mix)
    try:
        yield
    finally:
        set_scales(model, dict.fromkeys(mix, 1.0))


def nmse(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """Normalised mean square error: sum((got - wanted)^2) / sum(wanted^2), in float64."""
    exact = wanted.astype(np.float64)
    return float(np.square(got.astype(np.float64) - exact).sum() / np.square(exact).sum())


def write_golden(
    folder: Path,
    name: str,
    arrays: Mapping[str, NDArray[np.generic]],
    cases: list[Case],
    about: Mapping[str, object],
) -> None:
    """Write `name`.npz and `name`.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    text = {
        "magic": MAGIC,
        "version": VERSION,
        **about,
        "cases": [asdict(case) for case in cases],
        "arrays": {key: [str(a.dtype), list(a.shape)] for key, a in arrays.items()},
    }
    (folder / f"{name}.json").write_text(json.dumps(text, indent=1) + "\n")
