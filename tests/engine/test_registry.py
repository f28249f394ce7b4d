"""Names, generations, and the folder of adapters."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loragraph.engine.registry import AdapterHeader, Generation, LoadOptions, Registry
from loragraph.errors import (
    AdapterChangedError,
    AdapterFormatError,
    ConfigError,
    GGUFError,
    InvalidRequestError,
    ModelNotFoundError,
)

HEADER = AdapterHeader(100, 4, 1)


class Headers:
    """A reader that counts, and refuses files called bad."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.options: list[LoadOptions] = []

    def __call__(self, path: Path, options: LoadOptions) -> AdapterHeader:
        self.paths.append(path)
        self.options.append(options)
        if path.stem == "bad":
            raise GGUFError("damaged", path=path)
        return HEADER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two adapters and what is none; something outside of it."""
    folder = tmp_path / "adapters"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.gguf", "b.gguf", "notes.txt", ".hidden.gguf", "sub/c.gguf"):
        (folder / name).touch()
    (tmp_path / "outside.gguf").touch()
    (folder / "leak.gguf").symlink_to(tmp_path / "outside.gguf")
    (folder / "inside.gguf").symlink_to(folder / "a.gguf")
    return folder


def test_a_name_means_its_newest_generation() -> None:
    """Registering again swaps, tells the old one, and never uses a number twice."""
    registry = Registry(Headers())
    first, nothing = registry.register("a", "one.gguf")
    second, old = registry.register("a", "two.gguf")
    assert nothing is None
    assert old is first
    assert first.retired
    assert registry.resolve("a") is second
    assert second.number > first.number


def test_a_refused_file_leaves_the_name_as_it_was() -> None:
    """Its error comes out, and the name still means the old generation."""
    registry = Registry(Headers())
    first, _ = registry.register("a", "one.gguf")
    with pytest.raises(GGUFError):
        registry.register("a", "bad.gguf")
    assert registry.resolve("a") is first
    assert not first.retired


def test_an_unknown_name_is_told_the_known_ones() -> None:
    """Some of them, and how many more."""
    registry = Registry(Headers())
    for i in range(12):
        registry.register(f"n{i:02}", "x.gguf")
    with pytest.raises(ModelNotFoundError, match=r"'z'; known: n00, n01, .* and 4 more") as caught:
        registry.resolve("z")
    assert caught.value.status == 404


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a\\b", " a", "a\n", "x" * 129, 3, None])
def test_bad_names_are_refused(name: str) -> None:
    """Paths, blanks, control characters and what is no text."""
    registry = Registry(Headers())
    with pytest.raises(InvalidRequestError, match="adapter name"):
        registry.register(name, "x.gguf")
    with pytest.raises(ModelNotFoundError):
        registry.resolve(name)


def test_the_folders_adapters_are_known_and_read_on_demand(folder: Path) -> None:
    """All are listed, none is read before it is asked for, and then once."""
    headers = Headers()
    registry = Registry(headers, folder)
    assert registry.names() == ["a", "b", "inside"]
    assert headers.paths == []
    assert registry.resolve("a") is registry.resolve("a")
    assert headers.paths == [folder / "a.gguf"]


@pytest.mark.parametrize("name", ["leak", "../outside", "sub/c", ".hidden", "notes", "notes.txt"])
def test_nothing_outside_of_the_folder_is_found(name: str, folder: Path) -> None:
    """No path, no link that leads out, no hidden file, nothing but .gguf."""
    with pytest.raises(ModelNotFoundError):
        Registry(Headers(), folder).resolve(name)


def test_folders_of_peft_are_adapters_of_the_folder(folder: Path) -> None:
    """By their name, behind a file of it; not those that lead out, nor by a file's whole name."""
    outside = folder.parent / "outside"
    for made in (folder / "peft", folder / "a", outside, folder / "linked"):
        made.mkdir()
        (made / "adapter_config.json").touch()
    (folder / "leads-out").symlink_to(outside)
    (folder / "linked" / "adapter_model.safetensors").symlink_to(folder.parent / "outside.gguf")
    headers = Headers()
    registry = Registry(headers, folder)
    assert registry.names() == ["a", "b", "inside", "linked", "peft"]
    assert registry.resolve("peft").path == folder / "peft"
    assert registry.resolve("a").path == folder / "a.gguf"
    for name in ("leads-out", "a.gguf", "sub"):
        with pytest.raises(ModelNotFoundError):
            registry.resolve(name)
    with pytest.raises(AdapterFormatError, match=r"linked.*leads out"):
        registry.resolve("linked")
    assert headers.paths == [folder / "peft", folder / "a.gguf"]


def test_a_file_that_comes_later_is_found(folder: Path) -> None:
    """The folder is looked at again."""
    registry = Registry(Headers(), folder)
    (folder / "late.gguf").touch()
    assert "late" in registry.names()
    assert registry.resolve("late").path == folder / "late.gguf"


def test_an_unloaded_name_of_the_folder_stays_away_until_registered(folder: Path) -> None:
    """Else the next request would bring it back."""
    registry = Registry(Headers(), folder)
    old = registry.unload("a")
    assert old.retired
    assert registry.names() == ["b", "inside"]
    with pytest.raises(ModelNotFoundError):
        registry.resolve("a")
    registry.register("a", folder / "a.gguf")
    assert registry.names() == ["a", "b", "inside"]


def test_an_unload_that_meets_a_swap_leaves_the_new_generation(folder: Path) -> None:
    """It was of what the name meant before; the file of the folder can be found again later."""
    registry = Registry(Headers(), folder)
    old = registry.resolve("a")
    resolve = registry.resolve
    swapped: list[Generation] = []

    def late(name: str) -> Generation:
        found = resolve(name)
        swapped.append(registry.register(name, "other.gguf")[0])
        return found

    registry.resolve = late  # type: ignore[method-assign]
    assert registry.unload("a") is old
    assert registry.known("a") is swapped[0]
    assert not swapped[0].retired
    assert registry.path_in_dir("a") == folder / "a.gguf"


def test_a_made_generation_means_nothing_until_it_is_swapped_in() -> None:
    """It cannot be renewed into its name either."""
    registry = Registry(Headers())
    old, _ = registry.register("a", "one.gguf")
    new = registry.make("a", "two.gguf")
    assert registry.resolve("a") is old
    assert registry.renew(new, HEADER) is None
    assert registry.resolve("a") is old
    assert registry.swap(new) is old
    assert (old.retired, new.retired) == (True, False)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """With the flag's name."""
    with pytest.raises(ConfigError, match="adapter_dir"):
        Registry(Headers(), tmp_path / "absent")


def test_another_digest_at_a_reload_is_an_error() -> None:
    """The first one is noted; renewing gives a new generation of the file."""
    registry = Registry(Headers())
    old, _ = registry.register("a", "a.gguf")
    old.check_digest("one")
    old.check_digest("one")
    with pytest.raises(AdapterChangedError, match="overwritten"):
        old.check_digest("two")
    header = AdapterHeader(200, 9, 2, (7, 8))
    new = registry.renew(old, header)
    assert new is registry.resolve("a")
    assert new.header is header
    assert registry.renew(old, header) is None


def test_many_threads_resolve_one_generation(folder: Path) -> None:
    """A file that several ask for at once gets one generation."""
    registry = Registry(Headers(), folder)
    found: list[object] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait(10)
        found.append(registry.resolve("b"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found)) == 1


def test_a_generation_keeps_how_it_is_read() -> None:
    """Its header is read so, and a new generation of the same file is too."""
    headers = Headers()
    registry = Registry(headers)
    options = LoadOptions(ignore_norm=True, tied_output=False)
    old, _ = registry.register("a", "a.gguf", options)
    new = registry.renew(old, HEADER)
    assert new is not None
    assert (old.options, new.options, headers.options) == (options, options, [options])
