"""The native library as the command line opens it: LORAGRAPH_GGML_DIR names another build."""

from __future__ import annotations

import os
from pathlib import Path

from loragraph.ggml.lib import Library, load_library


def open_library() -> Library:
    """The library of LORAGRAPH_GGML_DIR, or that of llama-cpp-python."""
    folder = os.environ.get("LORAGRAPH_GGML_DIR")
    return load_library(Path(folder) if folder else None)
