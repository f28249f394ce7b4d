"""The page behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_page

TAKEN = (test_page,)
globals().update(taken_from(test_page, (), own_server=True))
