"""A line for each request, of the member that served it."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_access_log

TAKEN = (test_access_log,)
globals().update(
    taken_from(
        test_access_log,
        (
            # Serve's proxy gives an answer its X-Request-Id, which the body does not change.
            "test_the_id_of_an_answer_could_not_be_looked_up",
            "test_there_was_no_id_below_a_prefix",
        ),
        own_server=True,
    )
)
