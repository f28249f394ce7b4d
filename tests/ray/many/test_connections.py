"""Clients of a front that leave or read slowly."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_connections

TAKEN = (test_connections,)
globals().update(taken_from(test_connections, (), own_server=True))
