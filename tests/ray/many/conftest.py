"""The single server's modules of tests with a front and two members wherever they have a server.

A module here names those that it takes its tests from in `TAKEN`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from tests.ray import fleet
from tests.server.llamacpp.leaks import assert_idle
from tests.server.serving import Served, write_files


@pytest.fixture(scope="module", autouse=True)
def _many(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever makes a server gets a front with members, one a letter of the module's `IDS`."""
    serving = functools.partial(fleet.serving, ids=getattr(request.module, "IDS", "ab"))
    with pytest.MonkeyPatch.context() as patch:
        for module in request.module.TAKEN:
            patch.setattr(module, "serving", serving, raising=False)
            patch.setattr(module, "create_app", fleet.loading, raising=False)
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As the single server's, for modules that have none of their own."""
    folder = tmp_path_factory.mktemp("served")
    write_files(folder)
    with fleet.serving(folder) as one:
        yield one


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of it."""
    with served.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing of its requests is left in any member."""
    served = request.getfixturevalue("served") if "served" in request.fixturenames else None
    yield
    if served is not None:
        assert_idle(served)
