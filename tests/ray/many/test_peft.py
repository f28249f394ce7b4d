"""Folders of PEFT behind a front."""

from __future__ import annotations

from tests.ray.same import taken_from
from tests.server import test_peft

TAKEN = (test_peft,)
globals().update(
    taken_from(
        test_peft,
        # They look into the single server's engine and files; test_member.py has such folders.
        (
            "test_a_folder_is_converted",
            "test_replacing_a_folder",
            "test_folders_that_are_refused",
        ),
        own_server=True,
    )
)
