"""All routes of a front below a path."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_prefix

TAKEN = (test_prefix,)
globals().update(taken_from(test_prefix, (), own_server=True))
