"""Adapters from S3, by s3fs from moto's server; skipped where they are not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loragraph.adapters.convert.source import CONFIG, INDEX
from loragraph.cluster import transports
from loragraph.cluster.sources import SourceOptions, Sources, adapter_check
from loragraph.errors import SourceError
from loragraph.ggml.lib import Library
from tests.cluster.peft_files import PEFT, SHARDS, Files, folder, weights
from tests.cluster.s3_server import REASON, Request, S3Server, s3_server

FIRST, SECOND = SHARDS
FILES = folder(*SHARDS) | {SECOND: weights(*(f"t{i}" for i in range(1, 100)))}
PIECE = 1000
Open = Callable[..., Sources]


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    """One for all."""
    with s3_server() as server:
        yield server
    s3fs = pytest.importorskip("s3fs", reason=REASON)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(running: S3Server) -> S3Server:
    """An empty bucket `box`, where nothing is refused."""
    client = running.client()
    for entry in client.list_objects_v2(Bucket="box").get("Contents", ()):
        client.delete_object(Bucket="box", Key=entry["Key"])
    running.answer = lambda _request: 0
    running.requests.clear()
    return running


@pytest.fixture
def opened(s3: S3Server, tmp_path: Path, lib: Library, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Sources of one cache that read a thousand bytes at once."""
    monkeypatch.setattr(transports, "STORE_CHUNK_BYTES", PIECE)

    def make(max_tries: int = 1, key: str = "reader", secret: str = "secret") -> Sources:
        storage = {"s3": s3.storage(key, secret)}
        options = SourceOptions(tmp_path, max_tries=max_tries, storage=storage)
        return Sources(options, adapter_check(lib), sleep=lambda _: None)

    return make


def put(s3: S3Server, name: str, files: Files | bytes) -> str:
    """An object or several; the URL."""
    client = s3.client()
    for key, data in files.items() if isinstance(files, dict) else [("", files)]:
        client.put_object(Bucket="box", Key=f"{name}/{key}" if key else name, Body=data)
    return f"s3://box/{name}"


def found(sources: Sources, url: str) -> Files:
    """The files of a fetched folder."""
    with sources.fetch(url) as got:
        return {path.name: path.read_bytes() for path in got.path.iterdir()}


def pieces(size: int, start: int = 0) -> list[str]:
    """The ranges that a file is read in."""
    return [f"bytes={at}-{at + PIECE - 1}" for at in range(start, size, PIECE)]


def refuse(path: str, start: int, status: int = 503) -> Callable[[Request], int]:
    """Reads of an object that begin at `start` are refused."""
    return lambda request: (
        status * (request.path == path and request.range.startswith(f"bytes={start}-"))
    )


def test_a_gguf_adapter_is_fetched(s3: S3Server, opened: Open, tiny_adapter: bytes) -> None:
    """In pieces, each of the object that it began with; once."""
    url = put(s3, "some/adapter.gguf", tiny_adapter)
    with opened().fetch(url) as got:
        assert got.path.suffix == ".gguf"
        assert got.path.read_bytes() == tiny_adapter
        digest = got.digest
    assert s3.ranges("/box/some/adapter.gguf") == pieces(len(tiny_adapter))
    s3.requests.clear()
    opened().fetch(url, digest).close()
    assert s3.requests == []


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("files", [folder(PEFT), FILES])
def test_a_folder_is_fetched(s3: S3Server, opened: Open, files: Files, slash: str) -> None:
    """Whole or split, with and without a slash, and nothing else of it."""
    url = put(s3, "mine", {**files, "README.md": b"more"})
    assert found(opened(), url + slash) == files


def test_what_broke_off_is_resumed(s3: S3Server, opened: Open, tiny_adapter: bytes) -> None:
    """Within one fetch and by the next one."""
    path, size = "/box/adapter.gguf", len(tiny_adapter)
    url = put(s3, "adapter.gguf", tiny_adapter)
    s3.answer = refuse(path, 2 * PIECE)
    with pytest.raises(SourceError, match="the file system failed"):
        opened(max_tries=2).fetch(url)
    assert s3.ranges(path) == [*pieces(size)[:3], pieces(size)[2]]
    s3.answer = lambda _request: 0
    s3.requests.clear()
    with opened().fetch(url) as got:
        assert got.path.read_bytes() == tiny_adapter
    assert s3.ranges(path) == pieces(size, 2 * PIECE)


def test_split_weights_that_broke_off_are_resumed(s3: S3Server, opened: Open) -> None:
    """Nothing is read twice."""
    url = put(s3, "mine", FILES)
    s3.answer = refuse(f"/box/mine/{SECOND}", PIECE)
    with pytest.raises(SourceError, match="the file system failed"):
        opened().fetch(url)
    s3.answer = lambda _request: 0
    s3.requests.clear()
    assert found(opened(), url) == FILES
    assert [s3.ranges(f"/box/mine/{name}") for name in (CONFIG, INDEX, FIRST)] == [[], [], []]
    assert s3.ranges(f"/box/mine/{SECOND}") == pieces(len(FILES[SECOND]), PIECE)


def test_an_object_that_changes_is_not_mixed(
    s3: S3Server, opened: Open, tiny_adapter: bytes
) -> None:
    """While it is read, and between two tries, with the same size."""
    url, path = put(s3, "adapter.gguf", tiny_adapter[::-1]), "/box/adapter.gguf"
    changes = iter([tiny_adapter])

    def change(request: Request) -> int:
        if refuse(path, PIECE)(request) and (data := next(changes, None)):
            put(s3, "adapter.gguf", data)
        return 0

    s3.answer = change
    with opened(max_tries=2).fetch(url) as got:
        assert got.path.read_bytes() == tiny_adapter
    put(s3, "mine", FILES)
    s3.answer = refuse(f"/box/mine/{SECOND}", PIECE)
    with pytest.raises(SourceError):
        opened().fetch("s3://box/mine")
    s3.answer = lambda _request: 0
    new = {name: data.replace(b'"t', b'"u') for name, data in FILES.items()}
    put(s3, "mine", new)
    assert found(opened(), "s3://box/mine") == new


@pytest.mark.parametrize("url", ["s3://box/none.gguf", "s3://nobody-has-this/a.gguf"])
def test_a_missing_object_is_told_as_such(opened: Open, url: str) -> None:
    """And a missing bucket."""
    with pytest.raises(SourceError, match="no such file"):
        opened().fetch(url)


@pytest.mark.parametrize("url", ["s3://box/none/", "s3://box"])
def test_a_folder_without_an_adapter_is_told_as_such(opened: Open, url: str) -> None:
    """A bucket is one too."""
    with pytest.raises(SourceError, match=f"none with a file {CONFIG}"):
        opened().fetch(url)


@pytest.fixture
def rights(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The server asks for rights; the key of a user who has none."""
    iam = s3.client("iam")
    iam.create_user(UserName="nobody")
    key = iam.create_access_key(UserName="nobody")["AccessKey"]
    moto = pytest.importorskip("moto.settings", reason=REASON)
    monkeypatch.setattr(moto, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    return {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}


def test_credentials_that_may_not_read_are_told_as_such(
    opened: Open, rights: dict[str, Any]
) -> None:
    """Of nobody, wrong ones, and of somebody without the right to; none is shown."""
    for given in ({"key": "unknown"}, rights | {"secret": "hush"}, rights):
        with pytest.raises(SourceError, match="may not be read") as caught:
            opened(**given).fetch("s3://box/adapter.gguf")
        assert "credentials" in (caught.value.hint or "")
        assert not any(value in str(caught.value) for value in given.values())
        with pytest.raises(SourceError, match="that can be read"):
            opened(**given).fetch("s3://box/mine/")
