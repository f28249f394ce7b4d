"""Tests of the single server, taken over for the front."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any


def taken_from(module: ModuleType, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """A module's tests by new names, and its fixtures but for its server.

    `leave_out`: tests that look into a server's own objects.
    """
    short = module.__name__.rpartition(".")[2].removeprefix("test_")
    found: dict[str, Any] = {}
    missing = set(leave_out)
    for name, value in vars(module).items():
        missing.discard(name)
        if name in leave_out or name in ("served", "http"):
            continue
        if name.startswith("test_") and callable(value):
            found[f"test_{short}_{name.removeprefix('test_')}"] = value
        elif type(value).__name__ == "FixtureFunctionDefinition":
            found[name] = value
    assert not missing, f"{module.__name__} has no {missing}"
    return found
