"""Fixtures of the adapter tests."""

from __future__ import annotations

import pytest

from loragraph.ggml.lib import Library, load_library


@pytest.fixture(scope="session")
def lib() -> Library:
    """The native library."""
    return load_library()
