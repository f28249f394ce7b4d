from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.llamacpp.leaks import assert_idle
from tests.server.serving import Served


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that has a server, nothing of its requests is left in the engine."""
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        assert isinstance(served, Served)
        assert_idle(served)
