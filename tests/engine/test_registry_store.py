"""Names whose adapters a store keeps: found lazily, withdrawn, no old one ever brought back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loragraph.engine.registry import AdapterHeader, LoadOptions, Registry, Stored
from loragraph.errors import GGUFError, ModelNotFoundError

HEADER = AdapterHeader(100, 4, 1)


class FakeStore:
    """Generations by name; a hook runs while one is being fetched."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self.opened: list[tuple[str, int]] = []
        self.while_open: Callable[[], None] = lambda: None

    def names(self) -> Collection[str]:
        return self.numbers.keys()

    def find(self, name: str) -> Stored | None:
        number = self.numbers.get(name)
        if number is None:
            return None

        @contextmanager
        def opener() -> Iterator[Path]:
            self.opened.append((name, number))
            hook, self.while_open = self.while_open, lambda: None
            hook()
            yield Path(f"/cache/{name}-{number}.gguf")

        return Stored(number, Path(f"/shared/{name}.gguf"), opener)

    def shown(self, name: str) -> tuple[int, Path] | None:
        number = self.numbers.get(name)
        return None if number is None else (number, Path(f"/shared/{name}.gguf"))

    def is_current(self, name: str, number: int) -> bool:
        return self.numbers.get(name) == number


def read_header(path: Path, options: LoadOptions) -> AdapterHeader:
    """Refuses a file called bad."""
    if path.stem.startswith("bad"):
        raise GGUFError("damaged", path=path)
    return HEADER


def made(store: FakeStore) -> Registry:
    """A registry of it."""
    return Registry(read_header, store=store)


def test_a_name_is_found_when_it_is_asked_for() -> None:
    """Once, with the store's number and path; lists need no fetch."""
    store = FakeStore(a=5, b=7)
    registry = made(store)
    assert registry.names() == ["a", "b"]
    assert registry.shown("a") == (5, Path("/shared/a.gguf"))
    assert registry.shown("c") == (None, None)
    assert registry.known("a") is None
    assert store.opened == []
    found = registry.resolve("a")
    assert (found.number, found.path) == (5, Path("/shared/a.gguf"))
    assert registry.resolve("a") is found is registry.known("a")
    assert store.opened == [("a", 5)]
    with found.opened() as path:
        assert path == Path("/cache/a-5.gguf")


@pytest.mark.parametrize("name", ["c", "../a", "", ".a"])
def test_an_unknown_name(name: str) -> None:
    """Tells the known ones, and what is no name is not looked for."""
    with pytest.raises(ModelNotFoundError, match="known: a"):
        made(FakeStore(a=1)).resolve(name)


def test_a_file_that_is_refused_stays_unknown() -> None:
    """It is asked for again the next time."""
    store = FakeStore(bad=1)
    registry = made(store)
    for _ in range(2):
        with pytest.raises(GGUFError):
            registry.resolve("bad")
    assert len(store.opened) == 2


def test_a_withdrawn_name_is_looked_up_anew() -> None:
    """The old generation is retired, and goes on for who holds it."""
    store = FakeStore(a=1)
    registry = made(store)
    old = registry.resolve("a")
    store.numbers["a"] = 2
    assert registry.withdraw("a") is old
    assert old.retired
    assert registry.withdraw("a") is None
    assert registry.resolve("a").number == 2


def test_a_slow_fetch_brings_no_old_generation_back() -> None:
    """The name was swapped and withdrawn while the old content was being fetched."""
    store = FakeStore(a=1)
    registry = made(store)

    def swap() -> None:
        store.numbers["a"] = 2
        registry.withdraw("a")

    store.while_open = swap
    assert registry.resolve("a").number == 2
    assert store.opened == [("a", 1), ("a", 2)]
    assert registry.resolve("a").number == 2


def test_a_name_that_is_dropped_while_it_is_fetched_is_unknown() -> None:
    """And does not come back."""
    store = FakeStore(a=1)
    registry = made(store)
    store.while_open = lambda: store.numbers.clear()
    with pytest.raises(ModelNotFoundError):
        registry.resolve("a")
    assert registry.known("a") is None


def test_several_names_are_looked_up_at_one_moment() -> None:
    """Swapped one after the other meanwhile, they are the two old ones or the two new ones."""
    store = FakeStore(a=1, b=2)
    registry = made(store)
    registry.resolve("a")

    def swap() -> None:
        for name, number in (("a", 3), ("b", 4)):
            store.numbers[name] = number
            registry.withdraw(name)

    store.while_open = swap  # while b is fetched, a has been looked up
    assert [one.number for one in registry.resolve_all(["a", "b"])] == [3, 4]
    assert registry.resolve_all([]) == []


def test_a_verified_file_gets_no_generation_of_our_own() -> None:
    """Only the store gives numbers."""
    registry = made(FakeStore(a=1))
    assert registry.renew(registry.resolve("a"), HEADER) is None
