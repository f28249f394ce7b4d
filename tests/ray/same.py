"""Tests of the single server, taken over for the front."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

_SERVERS = frozenset(
    {"served", "http", "own", "short", "guarded", "serving", "serve", "create_app"}
)
"""Names of fixtures and functions that a test has a server by."""


def taken_from(
    module: ModuleType, leave_out: Collection[str] = (), *, own_server: bool = False
) -> dict[str, Any]:
    """A module's tests that have a server, by new names, and its fixtures.

    `leave_out`: tests that look into a single server's own objects. `own_server`: with its fixtures
    `served` and `http`, for a module whose server is not the usual one.
    """
    short = module.__name__.rpartition(".")[2].removeprefix("test_")
    found: dict[str, Any] = {}
    missing = set(leave_out)
    for name, value in vars(module).items():
        missing.discard(name)
        if name in leave_out:
            continue
        if name.startswith("test_") and callable(value):
            if _has_server(value):
                found[f"test_{short}_{name.removeprefix('test_')}"] = value
        elif type(value).__name__ == "FixtureFunctionDefinition" and (
            own_server or name not in ("served", "http")
        ):
            found[name] = value
    assert not missing, f"{module.__name__} has no {missing}"
    return found


def _has_server(test: Callable[..., Any]) -> bool:
    """By its fixtures, or by what it calls; fixtures of fixtures count by their names."""
    plain = inspect.unwrap(test)
    names = {*inspect.signature(plain).parameters, *plain.__code__.co_names}
    return bool(names & _SERVERS) or "client" in names
