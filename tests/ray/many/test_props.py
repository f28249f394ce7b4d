"""Properties and slots behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server.llamacpp import test_props

TAKEN = (test_props,)
globals().update(
    taken_from(
        test_props,
        (
            # Its server is another one; it is in tests/ray/test_same_answers.py.
            "test_props_have_llama_servers_keys",
            # They ask within a stream, which is over sooner where a front reads it.
            "test_a_busy_slot",
            "test_no_slot_left",
        ),
        own_server=True,
    )
)
