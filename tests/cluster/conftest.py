"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loragraph.cluster.sources import SourceOptions
from loragraph.ggml.lib import Library, load_library
from tests.cluster.http_files import FileServer, file_server
from tests.tiny import TinyAdapter, TinyLlama


@pytest.fixture(scope="session")
def lib() -> Library:
    """The native library."""
    return load_library()


@pytest.fixture(scope="session")
def tiny_adapter() -> bytes:
    """A GGUF adapter's file."""
    return TinyAdapter().to_bytes(TinyLlama())


@pytest.fixture
def options(tmp_path: Path) -> SourceOptions:
    """One try, and fsspec's own memory beside the usual schemes."""
    root = tmp_path / "shared"
    root.mkdir()
    schemes = frozenset({"file", "http", "memory"})
    return SourceOptions(tmp_path / "cache", root, schemes, max_tries=1)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server of files."""
    with file_server() as running:
        yield running
