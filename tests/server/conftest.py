from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest

from tests.server.serving import Served, serving, write_files


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a tiny base with the adapters alpha, beta and gamma; shared by a file's tests."""
    folder = tmp_path_factory.mktemp("served")
    write_files(folder)
    with serving(folder) as one:
        yield one


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of it."""
    with served.client() as client:
        yield client
