"""The figures of the page: one member's."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_page_state

TAKEN = (test_page_state,)
globals().update(
    taken_from(
        test_page_state,
        # They ask the single server's engine, or change it.
        (
            "test_figures_are_the_engines",
            "test_rows_tell_what_the_table_shows",
            "test_a_pin_shows",
            "test_only_changed_rows_are_sent",
            "test_many_viewers_cost_one_snapshot",
        ),
        own_server=True,
    )
)
