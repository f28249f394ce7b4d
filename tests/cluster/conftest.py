"""Fixtures of the cluster tests."""

from __future__ import annotations

import pytest

from loragraph.ggml.lib import Library, load_library
from tests.tiny import TinyAdapter, TinyLlama


@pytest.fixture(scope="session")
def lib() -> Library:
    """The native library."""
    return load_library()


@pytest.fixture(scope="session")
def tiny_adapter() -> bytes:
    """A GGUF adapter's file."""
    return TinyAdapter().to_bytes(TinyLlama())
