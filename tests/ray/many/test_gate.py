"""Keys, hosts, origins, ids and limits in front of a member that is loading."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_gate

TAKEN = (test_gate,)
globals().update(
    taken_from(
        test_gate,
        ("test_request_ids",),  # Serve's proxy adds them: tests/ray/test_front.py
        own_server=True,
    )
)
