"""The tests of `lora` and of the default mix, against the front of two replicas."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server.llamacpp import test_lora

globals().update(taken_from(test_lora))
