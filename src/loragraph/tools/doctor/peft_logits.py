"""The same tokens through PEFT itself, where torch, transformers and peft are installed.

transformers makes the base from the GGUF file, dequantised, so no other file and no network is
needed. What PEFT and loragraph differ by on the base alone is what rounding explains; the adapter
must not add to it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loragraph.tools.doctor.report import Diagnosis
from loragraph.tools.doctor.text import Logits, chunks

_PACKAGES = ("torch", "transformers", "peft")
# What transformers raises for a GGUF file, or a folder, that it cannot read.
_CANNOT = (ImportError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)
_FLOOR = 1e-6  # of NMSE: differences that are rounding whatever the base


def check_logits(
    base: Path,
    folder: Path,
    tokens: Sequence[int],
    rows: tuple[Logits, Logits],
    found: Diagnosis,
) -> None:
    """Compares with PEFT, or says why that was not possible."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        found.add(
            "fact",
            "peft logits",
            f"not compared with PEFT's own logits: {', '.join(missing)} not installed",
        )
        return
    try:
        theirs = _peft_rows(base, folder, tokens)
    except _CANNOT as exc:
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        found.add("fact", "peft logits", f"not compared with PEFT's own logits: {reason}")
        return
    before, after = (
        _nmse(one, other) if one.shape == other.shape else float("inf")
        for one, other in zip(rows, theirs, strict=True)
    )
    found.numbers["peft_logits"] = {"nmse_base": before, "nmse_adapter": after}
    text = f"beside PEFT: NMSE of the log-probabilities {after:.2g}, of the base alone {before:.2g}"
    if after > 4 * before + _FLOOR:
        found.add("problem", "peft logits", f"{text}: it does not do what PEFT does")
    else:
        found.add("fact", "peft logits", f"{text}: it does what PEFT does")


def _peft_rows(base: Path, folder: Path, tokens: Sequence[int]) -> tuple[Logits, Logits]:
    """Logits of base and adapter as PEFT computes them, in f32."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(base.parent), gguf_file=base.name, dtype=torch.float32, local_files_only=True
    )
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        plain = model(ids).logits[0].float().numpy()
        adapted = peft.PeftModel.from_pretrained(model, str(folder))
        full = adapted(ids).logits[0].float().numpy()
    return plain, full


def _nmse(actual: Logits, expected: Logits) -> float:
    """Of the log-probabilities."""
    error = power = 0.0
    for one, other in chunks(actual, expected):
        error += float(np.sum((one - other) ** 2))
        power += float(np.sum(other**2))
    return error / power
