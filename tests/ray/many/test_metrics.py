"""Metrics of all members together."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_metrics

TAKEN = (test_metrics,)
IDS = "a"  # it counts loads where there is room for one
globals().update(
    taken_from(
        test_metrics,
        (
            # It changes the single server's engine.
            "test_counters_of_loads_never_fall",
            # It damages a file that members have a copy of, under its digest.
            "test_failures_are_counted_over_http",
        ),
        own_server=True,
    )
)
