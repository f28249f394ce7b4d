"""The native library as the command line opens it: LORAGRAPH_GGML_DIR names another build."""

from __future__ import annotations

import os
from pathlib import Path

from loragraph.ggml.lib import Library, load_library


def ggml_folder() -> Path | None:
    """The folder that LORAGRAPH_GGML_DIR names; None means llama-cpp-python's."""
    folder = os.environ.get("LORAGRAPH_GGML_DIR")
    return Path(folder) if folder else None


def open_library() -> Library:
    """The library of LORAGRAPH_GGML_DIR, or that of llama-cpp-python."""
    return load_library(ggml_folder())
