"""Infilling behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server.llamacpp import test_infill

TAKEN = (test_infill,)
globals().update(taken_from(test_infill, (), own_server=True))
