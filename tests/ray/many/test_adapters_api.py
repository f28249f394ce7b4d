"""Adapters loaded, replaced, unloaded and pinned through a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_adapters_api

TAKEN = (test_adapters_api,)
globals().update(
    taken_from(
        test_adapters_api,
        (
            # They look into a single server's engine or state.
            "test_load_and_unload",
            "test_one_change_of_a_name_at_a_time",
            "test_prompts_of_one_request_use_one_generation",
            "test_a_replacement_without_room_keeps_the_generation_and_its_options",
            "test_a_mix_that_meets_an_unload_holds_no_unknown_name",
            # Room is each member's own; tests/ray/test_member.py has pins of many.
            "test_pins",
        ),
        own_server=True,
    )
)
