"""The single server's own end-to-end tests, against the front of two replicas."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import (
    test_best_of,
    test_compare,
    test_openai,
    test_openai_streams,
    test_page,
    test_post_sampling,
)
from tests.server.llamacpp import (
    test_completion,
    test_endings,
    test_errors,
    test_props,
    test_tokens,
)

for _module, _leave_out in (
    (test_openai, ()),
    (test_openai_streams, ()),
    (test_best_of, ()),
    (test_page, ("test_a_server_may_have_no_page", "test_the_page_needs_no_key_and_its_routes_do")),
    (test_post_sampling, ()),
    (test_compare, ("test_who_leaves_ends_all_requests",)),
    (test_completion, ()),
    (
        test_endings,
        (
            "test_a_stream_that_is_left_frees_everything",
            "test_an_answer_that_nobody_waits_for_ends",
        ),
    ),
    (test_errors, ("test_while_draining",)),
    (test_props, ("test_a_busy_slot",)),  # of one replica, whichever serves the stream
    (test_tokens, ()),
):
    globals().update(taken_from(_module, _leave_out))
