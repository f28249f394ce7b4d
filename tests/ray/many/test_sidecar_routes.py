"""Sidecars behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_sidecar_routes

TAKEN = (test_sidecar_routes,)
globals().update(
    taken_from(
        test_sidecar_routes,
        ("test_a_request_is_computed_with_what_its_key_was_asked_for",),
        own_server=True,
    )
)
