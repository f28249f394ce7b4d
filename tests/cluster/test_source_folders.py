"""Folders of PEFT and MLX from a shared folder, by HTTP and by fsspec: the whole adapter, bounded,
under one digest, and never a pickle.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fsspec
import pytest

from loragraph.adapters.convert.source import CONFIG, INDEX
from loragraph.cluster.cache import digest_of
from loragraph.cluster.sources import SourceOptions, Sources, adapter_check
from loragraph.errors import LoragraphError, SourceError, UnsupportedError
from loragraph.ggml.lib import Library
from tests.cluster.http_files import FileServer, cut_first, ranged
from tests.cluster.peft_files import MLX, PEFT, SHARDS, Files, folder, weights

Put = Callable[[Files], str]
"""Puts files into a folder; the source that names it."""


@pytest.fixture(params=["file", "http", "memory"])
def put(
    request: pytest.FixtureRequest, options: SourceOptions, server: FileServer
) -> Iterator[Put]:
    """Of each kind of source; what was there before is gone."""
    memory = fsspec.filesystem("memory")

    def to_disk(files: Files) -> str:
        assert options.root
        path = options.root / "mine"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        return "mine"

    def to_server(files: Files) -> str:
        server.answers.clear()
        for name, data in files.items():
            server.add(f"/mine/{name}", data, ranged)
        return f"http://127.0.0.1:{server.server_port}/mine/"

    def to_memory(files: Files) -> str:
        if memory.exists("/mine"):
            memory.rm("/mine", recursive=True)
        memory.makedirs("/mine")
        for name, data in files.items():
            memory.pipe(f"/mine/{name}", data)
        return "memory://mine/"

    yield {"file": to_disk, "http": to_server, "memory": to_memory}[request.param]
    memory.store.clear()


def opened(options: SourceOptions, lib: Library) -> Sources:
    """Sources with the checks of adapters."""
    return Sources(options, adapter_check(lib), sleep=lambda _: None)


def left(options: SourceOptions) -> list[str]:
    """What is left of unfinished fetches, and what was published."""
    parts = [p.name for p in (options.cache_dir / "parts").iterdir() if p.suffix != ".lock"]
    return [*parts, *(p.name for p in (options.cache_dir / "blobs").iterdir())]


@pytest.mark.parametrize("names", [[PEFT], [MLX], SHARDS])
def test_an_adapter_is_fetched_whole(
    put: Put, options: SourceOptions, lib: Library, names: list[str]
) -> None:
    """Configuration and weights of PEFT, MLX, or in several files, and nothing else of it."""
    files = folder(*names)
    source = put({**files, "README.md": b"more", "optimizer.pt": b"more"})
    with opened(options, lib).fetch(source) as got:
        assert {path.name: path.read_bytes() for path in got.path.iterdir()} == files
        assert got.digest == digest_of(got.path)
        assert got.size_bytes == sum(map(len, files.values()))


def test_the_digest_is_that_of_all_files(put: Put, options: SourceOptions, lib: Library) -> None:
    """Wherever they come from; another configuration or other weights are another adapter, which
    is refused under the digest of the first.
    """
    first = folder(PEFT)
    with opened(options, lib).fetch(put(first)) as got:
        digest = got.digest
    lines = [
        f"{name} {len(data)} {hashlib.sha256(data).hexdigest()}\n" for name, data in first.items()
    ]
    assert digest == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    for name in first:
        other = {**first, name: weights("x") if name == PEFT else b'{"peft_type": "LORA", "r": 1}'}
        source = put(other)
        shutil.rmtree(options.cache_dir)
        with pytest.raises(SourceError, match="expected the content") as caught:
            opened(options, lib).fetch(source, digest)
        assert caught.value.status == 409
        with opened(options, lib).fetch(source) as got:
            assert got.digest != digest


def test_weights_of_an_earlier_time_are_not_taken_along(
    put: Put, options: SourceOptions, lib: Library
) -> None:
    """Split weights became one file after a fetch had failed half-way."""
    sources = opened(options, lib)
    broken = folder(*SHARDS)
    del broken[SHARDS[1]]
    with pytest.raises(SourceError, match=SHARDS[1]):
        sources.fetch(put(broken))
    with sources.fetch(put(folder(PEFT))) as got:
        assert {path.name for path in got.path.iterdir()} == {CONFIG, PEFT}


@pytest.mark.parametrize("names", [[PEFT], [MLX], SHARDS])
def test_a_folder_is_bounded_as_a_whole(
    put: Put, options: SourceOptions, lib: Library, names: list[str]
) -> None:
    """Not each of its files alone; nothing of it stays."""
    files = folder(*names)
    whole = sum(map(len, files.values()))
    source = put(files)
    with pytest.raises(SourceError, match="expected at most"):
        opened(replace(options, max_file_bytes=whole - 1), lib).fetch(source)
    assert left(options) == []
    with opened(replace(options, max_file_bytes=whole), lib).fetch(source) as got:
        assert got.size_bytes == whole


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_pickled_weights_are_refused(
    put: Put, options: SourceOptions, lib: Library, name: str
) -> None:
    """Without being fetched; beside safetensors nobody reads them."""
    source = put({**folder(), name: b"\x80\x04"})
    with pytest.raises(UnsupportedError, match="pickled") as caught:
        opened(options, lib).fetch(source)
    assert "loragraph convert" in (caught.value.hint or "")
    assert left(options) == []
    with opened(options, lib).fetch(put({**folder(MLX), name: b"\x80\x04"})) as got:
        assert name not in {path.name for path in got.path.iterdir()}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {PEFT: weights("a")},
        folder(),
        {CONFIG: b"{}", INDEX: b"{}"},
        {CONFIG: b"{}", INDEX: b'{"weight_map": {"a": "../../etc/passwd"}}'},
        {CONFIG: b"{}", INDEX: b'{"weight_map": {"a": "b/c.safetensors"}}'},
        {CONFIG: b"{}", INDEX: b'{"weight_map": {"a": "none.safetensors"}}'},
        {CONFIG: b"[", PEFT: weights("a")},
        {CONFIG: b"{}", PEFT: b"no safetensors"},
    ],
)
def test_what_is_no_adapter_is_not_published(
    put: Put, options: SourceOptions, lib: Library, files: Files
) -> None:
    """Without configuration or weights, with an index that leads elsewhere, or damaged."""
    source = put(files)
    with pytest.raises(LoragraphError):
        opened(options, lib).fetch(source)
    assert left(options) == []


def test_weights_that_were_cut_off_are_resumed(
    server: FileServer, options: SourceOptions, lib: Library
) -> None:
    """By the next fetch too; those that were cut are not mistaken for missing ones."""
    data = weights(*(f"t{i}" for i in range(1000)))
    server.add(f"/mine/{CONFIG}", b"{}", ranged)
    url = server.add(f"/mine/{PEFT}", data, cut_first(1000, ranged))
    source = url.removesuffix(PEFT)
    with pytest.raises(SourceError):
        opened(options, lib).fetch(source)
    with opened(options, lib).fetch(source) as got:
        assert (got.path / PEFT).read_bytes() == data
    assert server.ranges(f"/mine/{PEFT}") == ["", "bytes=1000-"]


def test_a_file_that_may_not_be_read_is_told_as_such(
    options: SourceOptions, lib: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say it for what is not there too."""

    def refuses(*_args: Any, **_more: Any) -> None:
        raise PermissionError("key=secret")

    monkeypatch.setattr(fsspec.filesystem("memory"), "info", refuses)
    with pytest.raises(SourceError, match="may not be read") as caught:
        opened(options, lib).fetch("memory://mine/a.gguf")
    assert "secret" not in str(caught.value)
    with pytest.raises(SourceError, match=CONFIG):
        opened(options, lib).fetch("memory://mine/")
