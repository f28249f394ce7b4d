"""The public names of the package."""

from __future__ import annotations

import inspect
from types import ModuleType

import loragraph


def test_all_is_sorted_and_has_no_duplicates() -> None:
    """`loragraph.__all__` reads as an index."""
    assert loragraph.__all__ == sorted(set(loragraph.__all__))


def test_all_is_exactly_the_public_names() -> None:
    """Every name without an underscore is listed, except submodules; every listed name exists."""
    # `annotations` is what `from __future__ import annotations` leaves behind.
    present = {
        name
        for name, value in vars(loragraph).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    listed = {name for name in loragraph.__all__ if not name.startswith("_")}

    assert listed == present
    assert [name for name in loragraph.__all__ if not hasattr(loragraph, name)] == []


def test_every_public_name_is_documented() -> None:
    """Public classes and functions, and their public methods, have docstrings of their own."""
    missing = []
    for name in loragraph.__all__:
        value = getattr(loragraph, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        members: dict[str, object] = {name: value}
        if inspect.isclass(value):
            members |= {
                f"{name}.{key}": member
                for key, member in vars(value).items()
                if not key.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property))
            }
        missing += [key for key, member in members.items() if not (member.__doc__ or "").strip()]

    assert missing == []
