"""Every route of a front against the OpenAPI document."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_schemathesis

TAKEN = (test_schemathesis,)
globals().update(taken_from(test_schemathesis, (), own_server=True))
