"""Generations behind a front that end before their time."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server.llamacpp import test_endings

TAKEN = (test_endings,)
globals().update(taken_from(test_endings, (), own_server=True))
