"""A line for each request, of the member that served it."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_access_log

TAKEN = (test_access_log,)
globals().update(taken_from(test_access_log, (), own_server=True))
