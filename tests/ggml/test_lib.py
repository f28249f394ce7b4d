"""The native library is opened once."""

from __future__ import annotations

from loragraph.ggml.lib import load_library


def test_the_library_is_opened_once_however_it_is_asked_for() -> None:
    """The default and its folder spelled out give one object."""
    library = load_library()
    assert load_library(None) is library
    assert load_library(library.folder) is library
