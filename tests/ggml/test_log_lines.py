"""The library's log lines reach error messages whoever holds the process-wide log callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragraph.errors import GGUFError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import load_library
from tests.oracle.libllama import Log


def test_error_text_survives_another_owner_of_the_log_callback(tmp_path: Path) -> None:
    """A reason that only the library's log tells is in our message, and the owner keeps its log."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(64))
    lib = load_library()
    with Log() as log:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(lib, path)
        own_lines = len(log.lines)
        lib.c.gguf_init_from_file(b"/nonexistent.gguf", [True, lib.ffi.NULL])

    assert "version" in str(caught.value)
    assert len(log.lines) > own_lines
