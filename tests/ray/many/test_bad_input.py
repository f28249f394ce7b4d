"""What is wrong with a request, told by a member through the front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_bad_input

TAKEN = (test_bad_input,)
globals().update(taken_from(test_bad_input, ("test_error_events_in_mid_stream",), own_server=True))
