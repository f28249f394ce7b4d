"""Many mixes at once behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_compare

TAKEN = (test_compare,)
globals().update(taken_from(test_compare, (), own_server=True))
