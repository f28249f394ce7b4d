"""Fetches of folders that broke off: what is complete is kept, what has changed since is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fsspec
import pytest

from loragraph.adapters.convert.source import CONFIG, INDEX
from loragraph.cluster import transports
from loragraph.cluster.sources import SourceOptions, Sources, adapter_check
from loragraph.errors import DeadlineError, SourceError
from loragraph.ggml.lib import Library
from tests.cluster.http_files import (
    Answer,
    FileHandler,
    FileServer,
    cut_first,
    ranged,
)
from tests.cluster.peft_files import MLX, SHARDS, Files, folder, weights

FIRST, SECOND = SHARDS
LONG = weights(*(f"t{i}" for i in range(1, 1000)))
FILES = folder(*SHARDS) | {SECOND: LONG}


@pytest.fixture
def now() -> list[float]:
    """A clock that stands still."""
    return [0.0]


@pytest.fixture
def opened(options: SourceOptions, lib: Library) -> Callable[..., Sources]:
    """Makes the sources of another process with the same cache."""

    def make(**changes: Any) -> Sources:
        return Sources(replace(options, **changes), adapter_check(lib), sleep=lambda _: None)

    return make


def put(server: FileServer, files: Files, answer: Answer = ranged) -> str:
    """Serves a folder's files; its URL."""
    server.answers.clear()
    for name, data in files.items():
        server.add(f"/mine/{name}", data, answer)
    return f"http://127.0.0.1:{server.server_port}/mine/"


def broken_off(server: FileServer, sources: Sources, rest: Answer = ranged) -> str:
    """Begins to fetch a folder, the second shard of which is cut after 1,000 bytes; its URL."""
    url = put(server, FILES, rest)
    server.add(f"/mine/{SECOND}", LONG, cut_first(1000, rest))
    with pytest.raises(SourceError, match="got 1000"):
        sources.fetch(url)
    server.requests.clear()
    return url


def found(sources: Sources, source: str) -> Files:
    """The files of a fetched folder."""
    with sources.fetch(source) as got:
        return {path.name: path.read_bytes() for path in got.path.iterdir()}


def left(options: SourceOptions) -> list[str]:
    """What is left of unfinished fetches."""
    return [p.name for p in (options.cache_dir / "parts").iterdir() if p.suffix != ".lock"]


def asked(server: FileServer) -> dict[str, list[str]]:
    """The ranges that were asked for, of each file that is there."""
    names = (path.removeprefix("/mine/") for path in server.answers)
    return {name: server.ranges(f"/mine/{name}") for name in names}


def last_byte(name: str) -> str:
    """The range of the last byte."""
    return f"bytes={len(FILES[name]) - 1}-"


def tagged(etag: str) -> Answer:
    """Ignores ranges, and says which content it is."""
    return lambda handler, data: handler.reply(200, data, ETag=etag)


def changed(handler: FileHandler, data: bytes) -> None:
    """Ranges of another content, for which If-Range is honoured."""
    if "Range" in handler.headers and handler.headers.get("If-Range") == '"2"':
        start = int(handler.headers["Range"].removeprefix("bytes=").rstrip("-"))
        range_ = f"bytes {start}-{len(data) - 1}/{len(data)}"
        handler.reply(206, data[start:], ETag='"2"', Content_Range=range_)
    else:
        handler.reply(200, data, ETag='"2"')


def test_split_weights_began_anew_at_their_first_file(
    server: FileServer, opened: Callable[..., Sources], options: SourceOptions
) -> None:
    """Of what is complete only the last byte is asked for, of what was cut the rest."""
    url = broken_off(server, opened())
    assert found(opened(), url) == FILES
    expected = {name: [last_byte(name)] for name in FILES} | {SECOND: ["bytes=1000-"]}
    assert asked(server) == expected
    assert left(options) == []


def test_a_fetch_of_several_files_that_took_too_long_is_gone_on_with(
    server: FileServer, options: SourceOptions, lib: Library, now: list[float]
) -> None:
    """As its message says."""
    url = put(server, FILES)

    def takes_long(handler: FileHandler, data: bytes) -> None:
        now[0] += 2 * options.max_fetch_s
        handler.reply(200, data[:1000], len(data), ETag='"1"')

    server.add(f"/mine/{SECOND}", LONG, takes_long)
    sources = Sources(options, adapter_check(lib), sleep=lambda _: None, clock=lambda: now[0])
    with pytest.raises(DeadlineError) as caught:
        sources.fetch(url)
    assert "goes on from there" in (caught.value.hint or "")
    server.requests.clear()
    server.answers[f"/mine/{SECOND}"] = ranged
    assert found(sources, url) == FILES
    assert server.ranges(f"/mine/{FIRST}") == [last_byte(FIRST)]
    assert server.ranges(f"/mine/{SECOND}") == ["bytes=1000-"]


@pytest.mark.parametrize("name", [CONFIG, INDEX, FIRST, SECOND])
def test_a_file_that_changed_between_two_tries_is_fetched_anew(
    server: FileServer, opened: Callable[..., Sources], name: str
) -> None:
    """Of the same size, so that only the tag tells."""
    url = broken_off(server, opened())
    new = FILES | {name: FILES[name].replace(b"LORA", b"LOHA").replace(b'"t', b'"u')}
    assert len(new[name]) == len(FILES[name])
    assert new[name] != FILES[name]
    server.add(f"/mine/{name}", new[name], changed)
    assert found(opened(), url) == new


def test_a_file_that_grew_under_the_same_tag_is_fetched_anew(
    server: FileServer, opened: Callable[..., Sources]
) -> None:
    """Size and tag have to be what they were."""
    url = broken_off(server, opened())
    new = weights("t0", "more")
    server.files[f"/mine/{FIRST}"] = new
    assert found(opened(), url) == FILES | {FIRST: new}


def test_a_file_that_shrank_is_fetched_anew(
    server: FileServer, opened: Callable[..., Sources]
) -> None:
    """A server refuses what begins behind its end."""
    first = weights("t0", "more")
    url = put(server, FILES | {FIRST: first})
    server.add(f"/mine/{SECOND}", LONG, cut_first(1000, ranged))
    with pytest.raises(SourceError):
        opened().fetch(url)
    server.files[f"/mine/{FIRST}"] = FILES[FIRST]
    assert found(opened(), url) == FILES


def test_without_tags_nothing_is_kept(server: FileServer, opened: Callable[..., Sources]) -> None:
    """Nobody could tell whether it is the same still."""

    def untagged(handler: FileHandler, data: bytes) -> None:
        handler.reply(200, data)

    url = broken_off(server, opened(), untagged)
    assert found(opened(), url) == FILES
    assert server.ranges(f"/mine/{FIRST}") == [""]


def test_a_server_without_ranges_sends_a_tag_at_least(
    server: FileServer, opened: Callable[..., Sources]
) -> None:
    """Which is enough to keep what is complete: one question, and its answer is not read."""
    url = broken_off(server, opened(), tagged('"1"'))
    assert found(opened(), url) == FILES
    assert server.ranges(f"/mine/{FIRST}") == [last_byte(FIRST)]


def test_split_weights_that_became_one_file_leave_nothing(
    server: FileServer, opened: Callable[..., Sources], options: SourceOptions
) -> None:
    """Neither in the adapter nor in the bound of its size."""
    broken_off(server, opened())
    new = {CONFIG: FILES[CONFIG], MLX: LONG}
    url = put(server, new)
    assert found(opened(max_file_bytes=sum(map(len, new.values()))), url) == new
    assert left(options) == []


def test_kept_files_count_towards_the_bound(
    server: FileServer, opened: Callable[..., Sources], options: SourceOptions
) -> None:
    """Of all files together, in whatever try they came."""
    url = broken_off(server, opened())
    whole = sum(map(len, FILES.values()))
    with pytest.raises(SourceError, match="expected at most"):
        opened(max_file_bytes=whole - 1).fetch(url)
    assert left(options) == []


def test_an_outage_threw_away_what_was_there(
    server: FileServer, opened: Callable[..., Sources]
) -> None:
    """Of one file, or of a folder's complete ones, whatever is answered meanwhile."""
    url = broken_off(server, opened())
    answers = dict(server.answers)

    def down(handler: FileHandler, _data: bytes) -> None:
        handler.reply(503, b"")

    server.answers |= dict.fromkeys(answers, down)
    with pytest.raises(SourceError, match="503"):
        opened(max_tries=3).fetch(url)
    assert server.ranges(f"/mine/{CONFIG}") == [last_byte(CONFIG)] * 3
    server.answers |= answers | {f"/mine/{SECOND}": down}
    with pytest.raises(SourceError, match="503"):
        opened(max_tries=3).fetch(url)
    assert server.ranges(f"/mine/{SECOND}") == ["bytes=1000-", "bytes=1000-", ""]
    server.answers |= {f"/mine/{SECOND}": ranged}
    server.requests.clear()
    assert found(opened(), url) == FILES
    assert asked(server)[FIRST] == [last_byte(FIRST)]
    assert asked(server)[SECOND] == ["bytes=1000-"]


def test_a_right_that_ended_half_way_threw_away_what_was_there(
    server: FileServer, opened: Callable[..., Sources]
) -> None:
    """A token is renewed, and the fetch goes on."""
    url = broken_off(server, opened())

    def forbidden(handler: FileHandler, _data: bytes) -> None:
        handler.reply(403, b"")

    server.answers[f"/mine/{SECOND}"] = forbidden
    with pytest.raises(SourceError, match="403"):
        opened().fetch(url)
    server.answers[f"/mine/{SECOND}"] = ranged
    server.requests.clear()
    assert found(opened(), url) == FILES
    assert asked(server)[FIRST] == [last_byte(FIRST)]
    assert asked(server)[SECOND] == ["bytes=1000-"]


@pytest.mark.parametrize("status", [404, 410])
def test_a_shard_that_has_gone_ends_it(
    server: FileServer, opened: Callable[..., Sources], options: SourceOptions, status: int
) -> None:
    """It is no adapter anymore, so nothing of it stays."""
    url = broken_off(server, opened())
    server.answers[f"/mine/{SECOND}"] = lambda handler, _: handler.reply(status, b"")
    with pytest.raises(SourceError, match=f"expected {SECOND}, which {INDEX} names"):
        opened().fetch(url)
    assert left(options) == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> list[str]:
    """Names of files that were read where no HTTP is; the second shard takes for ever."""
    names: list[str] = []

    def watched(real: Callable[[str, object], Iterator[bytes]]) -> object:
        def chunks(url: str, file: object) -> Iterator[bytes]:
            names.append(url.rpartition("/")[2])
            now[0] += 1e9 * (names[-1] == SECOND)
            yield from real(url, file)

        return chunks

    for size in ("CHUNK_BYTES", "STORE_CHUNK_BYTES"):
        monkeypatch.setattr(transports, size, 1000)
    for name in ("_local_chunks", "_read_chunks"):
        monkeypatch.setattr(transports, name, watched(getattr(transports, name)))
    return names


def test_a_file_that_was_complete_in_the_end_is_not_late(
    options: SourceOptions, now: list[float], reads: list[str]
) -> None:
    """Nothing is left to wait for."""
    assert options.root
    (options.root / SECOND).write_bytes(LONG[:1000])
    sources = Sources(options, lambda _: None, sleep=lambda _: None, clock=lambda: now[0])
    with sources.fetch(SECOND) as got:
        assert got.path.read_bytes() == LONG[:1000]
    assert now[0] > options.max_fetch_s
    assert reads == [SECOND]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_kept_files_of_other_sources_are_not_read_again(
    options: SourceOptions, lib: Library, now: list[float], reads: list[str], kind: str
) -> None:
    """A shared folder, and a file system of fsspec."""
    assert options.root
    memory = fsspec.filesystem("memory")
    (options.root / "mine").mkdir()
    for name, data in FILES.items():
        (options.root / "mine" / name).write_bytes(data)
        memory.pipe(f"/mine/{name}", data)
    sources = Sources(options, adapter_check(lib), sleep=lambda _: None, clock=lambda: now[0])
    source = "mine" if kind == "file" else "memory://mine"
    with pytest.raises(DeadlineError):
        sources.fetch(source)
    assert reads == [CONFIG, INDEX, FIRST, SECOND]
    reads.clear()
    with pytest.raises(DeadlineError):
        sources.fetch(source)
    assert reads == [SECOND]
    assert found(Sources(options, adapter_check(lib)), source) == FILES
    memory.store.clear()


def test_a_file_that_was_cut_and_a_folder_of_its_name_are_told_apart(
    options: SourceOptions, lib: Library, now: list[float], reads: list[str]
) -> None:
    """What is there of one is no part of the other."""
    assert options.root
    path = options.root / SECOND
    path.write_bytes(LONG)
    sources = Sources(options, adapter_check(lib), sleep=lambda _: None, clock=lambda: now[0])
    with pytest.raises(DeadlineError):
        sources.fetch(SECOND)
    path.unlink()
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    with pytest.raises(DeadlineError):
        sources.fetch(SECOND)
    shutil.rmtree(path)
    path.write_bytes(LONG)
    with Sources(options, lambda _: None).fetch(SECOND) as got:
        assert got.path.read_bytes() == LONG
    assert reads == [SECOND, CONFIG, INDEX, FIRST, SECOND, SECOND]
    assert left(options) == []
