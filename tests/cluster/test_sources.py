"""Fetching adapters: bounded, resumed, verified, once, and without telling secrets."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry as loaded_file_systems

from loragraph.cluster import sources as module
from loragraph.cluster.sources import SourceOptions, Sources, adapter_check
from loragraph.cluster.transports import PACKAGES, require_packages
from loragraph.errors import (
    AdapterFormatError,
    CapacityError,
    ConfigError,
    DeadlineError,
    GGUFError,
    InvalidRequestError,
    LoragraphError,
    PermissionDeniedError,
    SourceError,
)
from loragraph.ggml.lib import Library
from tests.cluster.http_files import FileHandler, FileServer, cut_first, file_server, ranged, whole

DATA = bytes(range(256)) * 400
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def options(tmp_path: Path) -> SourceOptions:
    """Small bounds."""
    root = tmp_path / "shared"
    root.mkdir()
    return SourceOptions(tmp_path / "cache", root, timeout_s=5.0, max_fetch_s=30.0)


def opened(options: SourceOptions, check: module.Check = lambda _: None) -> Sources:
    """Sources that never wait before they try again."""
    return Sources(options, check, sleep=lambda _: None)


def forget(_value: object) -> None:
    """An answer that says nothing."""


def refused_later(go: threading.Event) -> Any:
    """An answer of 404 once `go` is set."""

    def answer(handler: FileHandler, _data: bytes) -> None:
        go.wait(10)
        handler.reply(404, b"")

    return answer


def parts(options: SourceOptions) -> list[str]:
    """What is left of unfinished fetches."""
    return [p.name for p in (options.cache_dir / "parts").iterdir() if p.suffix != ".lock"]


@pytest.mark.parametrize("answer", [whole, ranged])
def test_a_file_is_fetched_under_its_digest(
    server: FileServer, options: SourceOptions, answer: Any
) -> None:
    """And not asked for again, by this or another process with the same folder."""
    url = server.add("/a.gguf", DATA, answer)
    with opened(options).fetch(url, DIGEST) as got:
        assert got.path == options.cache_dir / "blobs" / f"{DIGEST}.gguf"
        assert (got.path.read_bytes(), got.digest, got.size_bytes) == (DATA, DIGEST, len(DATA))
    with opened(options).fetch(url, DIGEST) as again:
        assert again.path == got.path
    assert len(server.requests) == 1
    assert parts(options) == []


def test_a_cut_connection_is_resumed_from_where_it_ended(
    server: FileServer, options: SourceOptions
) -> None:
    """Only what is missing is asked for."""
    url = server.add("/a", DATA, cut_first(1000, ranged))
    with opened(options).fetch(url) as got:
        assert got.path.read_bytes() == DATA
    assert server.ranges("/a") == ["", "bytes=1000-"]


def test_a_server_that_ignores_ranges_is_asked_for_the_whole(
    server: FileServer, options: SourceOptions
) -> None:
    """What was there is thrown away."""
    url = server.add("/a", DATA, cut_first(1000, whole, times=2))
    with opened(options).fetch(url) as got:
        assert got.path.read_bytes() == DATA
    assert len(server.requests) == 3


def test_content_that_changes_between_two_parts_is_not_mixed(
    server: FileServer, options: SourceOptions
) -> None:
    """A range of another version counts for nothing."""
    url = server.add("/a", DATA, cut_first(1000, ranged, etag='"0"'))
    with opened(options).fetch(url) as got:
        assert got.path.read_bytes() == DATA
    assert server.ranges("/a") == ["", "bytes=1000-", ""]


def test_without_a_tag_only_a_digest_lets_a_part_be_used(
    server: FileServer, options: SourceOptions
) -> None:
    """Nobody could tell whether the two parts belong together."""
    url = server.add("/a", DATA, cut_first(1000, ranged, etag=""))
    opened(options).fetch(url).close()
    assert server.ranges("/a") == ["", ""]
    url = server.add("/b", DATA[1:], cut_first(1000, ranged, etag=""))
    opened(options).fetch(url, hashlib.sha256(DATA[1:]).hexdigest()).close()
    assert server.ranges("/b") == ["", "bytes=1000-"]


def test_what_is_there_of_a_file_survives_the_process(
    server: FileServer, options: SourceOptions
) -> None:
    """A fetch that gave up is gone on with by the next one."""
    url = server.add("/a", DATA, cut_first(1000, ranged, times=1))
    with pytest.raises(SourceError, match=f"expected {len(DATA)} bytes, got 1000"):
        opened(replace(options, max_tries=1)).fetch(url)
    with opened(options).fetch(url) as got:
        assert got.path.read_bytes() == DATA
    assert server.ranges("/a") == ["", "bytes=1000-"]


def test_a_server_that_always_cuts_is_given_up(server: FileServer, options: SourceOptions) -> None:
    """After max_tries tries that brought nothing."""
    url = server.add("/a", DATA, cut_first(0, whole, times=100))
    with pytest.raises(SourceError, match="got 0"):
        opened(options).fetch(url)
    assert len(server.requests) == options.max_tries


@pytest.mark.parametrize("length", [len(DATA) - 1, len(DATA) // 2])
def test_a_length_that_is_too_small_shows_by_the_digest(
    server: FileServer, options: SourceOptions, length: int
) -> None:
    """A truncated file is never used."""
    url = server.add("/a", DATA, lambda h, data: h.reply(200, data, length))
    with pytest.raises(SourceError, match="expected the content") as caught:
        opened(options).fetch(url, DIGEST)
    assert caught.value.status == 409
    assert list((options.cache_dir / "blobs").iterdir()) == []
    assert parts(options) == []


def test_a_wrong_digest_is_refused_and_leaves_nothing(
    server: FileServer, options: SourceOptions
) -> None:
    """Neither under the expected name nor under the real one."""
    url = server.add("/a", DATA, whole)
    with pytest.raises(SourceError, match=f"got {DIGEST[:12]}"):
        opened(options).fetch(url, "0" * 64)
    assert list((options.cache_dir / "blobs").iterdir()) == []


@pytest.mark.parametrize("length", [None, -1, 10**15])
def test_a_file_that_is_too_large_is_refused(
    server: FileServer, options: SourceOptions, length: int | None
) -> None:
    """By what the server says, or by what comes; no more than the bound is kept."""
    url = server.add("/a", DATA, lambda h, data: h.reply(200, data, length))
    with pytest.raises(SourceError, match="expected at most 5000 bytes"):
        opened(replace(options, max_file_bytes=5000)).fetch(url)
    assert parts(options) == []


def test_a_slow_server_ends_with_the_time(server: FileServer, options: SourceOptions) -> None:
    """One that sends a little now and then too."""
    leave = threading.Event()

    def drip(handler: FileHandler, data: bytes) -> None:
        handler.reply(200, b"", len(data), ETag='"1"')
        for _ in range(3000):
            if leave.wait(0.01):
                return
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    url = server.add("/a", DATA, drip)
    try:
        with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
            opened(replace(options, max_fetch_s=0.2)).fetch(url)
    finally:
        leave.set()


def test_a_silent_server_ends_with_the_time(server: FileServer, options: SourceOptions) -> None:
    """A connection that says nothing counts as cut."""
    leave = threading.Event()
    url = server.add("/a", DATA, lambda _h, _d: forget(leave.wait(30)))
    try:
        with pytest.raises(SourceError, match=r"timed out|TimeoutError"):
            opened(replace(options, timeout_s=0.1, max_tries=2)).fetch(url)
    finally:
        leave.set()


def test_a_redirect_is_followed_without_the_token(
    server: FileServer, options: SourceOptions
) -> None:
    """The token is for the host that it was given for."""
    with file_server() as other:
        target = other.add("/b", DATA, whole)
        url = server.add("/a", b"", lambda h, _: h.reply(302, b"", Location=target))
        storage = {"http": {"headers": {"Authorization": "Bearer secret"}}}
        opened(replace(options, storage=storage)).fetch(url).close()
        assert server.requests[0][1]["Authorization"] == "Bearer secret"
        assert "Authorization" not in other.requests[0][1]


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/a", "https://127.0.0.1/a", "gopher://x/"]
)
def test_a_redirect_to_a_scheme_that_is_not_allowed_is_refused(
    server: FileServer, options: SourceOptions, target: str
) -> None:
    """Whatever is allowed for sources themselves, HTTP leads to nothing but HTTP."""
    url = server.add("/a", b"", lambda h, _: h.reply(302, b"", Location=target))
    with pytest.raises(PermissionDeniedError, match="got sent to"):
        opened(replace(options, schemes=frozenset({"http", "file", "ftp"}))).fetch(url)


def test_a_circle_of_redirects_ends(server: FileServer, options: SourceOptions) -> None:
    """After five."""
    url = server.add("/a", b"", lambda h, _: h.reply(302, b"", Location="/a"))
    with pytest.raises(SourceError, match="at most 5 redirects"):
        opened(options).fetch(url)
    assert len(server.requests) == 6


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500, 503])
def test_an_answer_that_is_no_file_names_the_source_without_its_signature(
    server: FileServer, options: SourceOptions, status: int
) -> None:
    """What may help is tried again, what cannot is not."""
    url = server.add("/a", b"", lambda h, _: h.reply(status, b"no"))
    with pytest.raises(SourceError, match=f"status {status}") as caught:
        opened(options).fetch(f"{url}?sig=secret")
    assert "/a" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(server.requests) == (options.max_tries if status >= 500 else 1)
    assert parts(options) == []


def test_concurrent_fetches_of_one_url_are_one(server: FileServer, options: SourceOptions) -> None:
    """All of them get it; with a second process's folder lock the same."""
    started, go = threading.Event(), threading.Event()

    def held(handler: FileHandler, data: bytes) -> None:
        started.set()
        go.wait(10)
        handler.reply(200, data)

    url = server.add("/a", DATA, held)
    one, other = opened(options), opened(options)
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(one.fetch, url, DIGEST) for _ in range(4)]
        started.wait(10)
        futures += [pool.submit(other.fetch, url, DIGEST) for _ in range(2)]
        go.set()
        found = [future.result(20) for future in futures]
    assert len(server.requests) == 1
    assert {one.digest for one in found} == {DIGEST}
    for each in found:
        each.close()


def test_concurrent_fetches_fail_together(server: FileServer, options: SourceOptions) -> None:
    """And the next one tries anew."""
    go = threading.Event()
    url = server.add("/a", DATA, refused_later(go))
    sources = opened(options)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(sources.fetch, url) for _ in range(2)]
        go.set()
        for future in futures:
            with pytest.raises(SourceError, match="404"):
                future.result(20)
    server.answers["/a"] = whole
    sources.fetch(url).close()


def test_eviction_takes_the_least_recently_used_and_nothing_in_use(
    options: SourceOptions, tmp_path: Path
) -> None:
    """Where all is in use there is no room."""
    sources = opened(replace(options, max_cache_bytes=250))
    digests = {}
    for i, name in enumerate("abcd"):
        (tmp_path / "shared" / name).write_bytes(bytes([i]) * 100)
        digests[name] = hashlib.sha256(bytes([i]) * 100).hexdigest()
    a = sources.fetch("a")
    b = sources.fetch("b")
    with pytest.raises(CapacityError, match="expected room for 100 bytes, got 50 of 250"):
        sources.fetch("c")
    b.close()
    os.utime(a.path, (1, 1))  # older than b, but in use
    sources.fetch("c").close()
    assert {p.stem for p in (options.cache_dir / "blobs").iterdir()} == {digests["a"], digests["c"]}
    a.close()
    os.utime(options.cache_dir / "blobs" / f"{digests['a']}.gguf", (1, 1))
    sources.fetch("d").close()
    assert {p.stem for p in (options.cache_dir / "blobs").iterdir()} == {digests["c"], digests["d"]}


def test_a_file_larger_than_the_cache_evicts_nothing(options: SourceOptions) -> None:
    """It could never fit."""
    assert options.root
    sources = opened(replace(options, max_cache_bytes=250))
    (options.root / "a").write_bytes(b"x" * 100)
    (options.root / "big").write_bytes(b"x" * 300)
    sources.fetch("a").close()
    with pytest.raises(CapacityError):
        sources.fetch("big")
    assert len(list((options.cache_dir / "blobs").iterdir())) == 1


def test_a_damaged_file_of_the_cache_is_fetched_anew(options: SourceOptions) -> None:
    """A process trusts what it has verified itself."""
    assert options.root
    (options.root / "a").write_bytes(DATA)
    with opened(options).fetch("a", DIGEST) as got:
        got.path.write_bytes(DATA[:-1])
    with opened(options).fetch("a", DIGEST) as got:
        assert got.path.read_bytes() == DATA


@pytest.mark.parametrize(
    "source", ["../outside", "/etc/passwd", "link", "file:///etc/passwd", "x/../../outside", "."]
)
def test_a_path_stays_inside_the_shared_folder(
    options: SourceOptions, tmp_path: Path, source: str
) -> None:
    """Links are followed first."""
    (tmp_path / "outside").write_bytes(DATA)
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(PermissionDeniedError, match="inside the shared folder"):
        opened(options).fetch(source)


def test_a_path_in_the_shared_folder_is_copied(options: SourceOptions, tmp_path: Path) -> None:
    """As a relative path, an absolute one, or a file:// URL; overwriting it changes no copy."""
    path = tmp_path / "shared" / "a b.gguf"
    path.write_bytes(DATA)
    sources = opened(options)
    for source in ("a b.gguf", str(path), f"file://{path}".replace(" ", "%20")):
        with sources.fetch(source) as got:
            path.write_bytes(b"other")
            assert got.path.read_bytes() == DATA
        path.write_bytes(DATA)
    with pytest.raises(InvalidRequestError, match="there is no 'b'"):
        sources.fetch("b")
    os.mkfifo(tmp_path / "shared" / "pipe")
    with pytest.raises(SourceError, match="regular file"):
        sources.fetch("pipe")
    with pytest.raises(PermissionDeniedError, match="no shared folder"):
        opened(replace(options, root=None)).fetch("a b.gguf")


@pytest.mark.parametrize(
    "source",
    ["ftp://h/a", "memory://a", "simplecache::s3://b/a", "HTTP://h/a", "a\0b", "://x", "s3://"],
)
def test_other_schemes_and_chains_are_refused(options: SourceOptions, source: str) -> None:
    """fsspec would open them."""
    with pytest.raises(LoragraphError):
        opened(options).fetch(source)


@pytest.mark.parametrize("url", ["http://user:secret@127.0.0.1/a", "http://[x/a", "http:///a"])
def test_a_url_that_is_none_or_has_a_user_is_refused(options: SourceOptions, url: str) -> None:
    """Without repeating the password."""
    with pytest.raises(LoragraphError) as caught:
        opened(options).fetch(url)
    assert "secret" not in str(caught.value)


def test_a_file_system_of_fsspec(options: SourceOptions) -> None:
    """What it says becomes our errors."""
    files = fsspec.filesystem("memory")
    files.pipe("/dir/a.gguf", DATA)
    sources = opened(replace(options, schemes=frozenset({"memory"})))
    with sources.fetch("memory://dir/a.gguf") as got:
        assert got.path.read_bytes() == DATA
    with pytest.raises(SourceError, match="no such file"):
        sources.fetch("memory://dir/none")
    with pytest.raises(SourceError, match="expected a folder of PEFT or MLX"):
        sources.fetch("memory://dir")
    files.rm("/dir", recursive=True)


def test_what_a_file_system_raises_is_not_repeated(
    options: SourceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold credentials."""

    def fails(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("key=secret")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fails)
    with pytest.raises(SourceError, match="ZeroDivisionError") as caught:
        opened(options).fetch("s3://bucket/a?key=secret")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("missing", "url", "hint"),
    [
        ("fsspec", "s3://bucket/a", "loragraph[remote]"),
        ("s3fs", "s3://bucket/a", "pip install s3fs"),
        ("gcsfs", "gs://bucket/a", "pip install gcsfs"),
        ("gcsfs", "gcs://bucket/a", "pip install gcsfs"),
        ("adlfs", "abfs://box/a", "pip install adlfs"),
        ("huggingface_hub", "hf://owner/repo/a", "pip install huggingface_hub"),
    ],
)
def test_a_missing_package_is_named(
    options: SourceOptions, monkeypatch: pytest.MonkeyPatch, missing: str, url: str, hint: str
) -> None:
    """With what to install, when it is asked for and, by schemes, at the start."""
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    for scheme in PACKAGES:  # of those that were used before
        monkeypatch.delitem(loaded_file_systems, scheme, raising=False)
    for ask in (
        lambda: opened(options).fetch(url),
        lambda: require_packages(["http", url.partition("://")[0]]),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert hint in (caught.value.hint or "")
        assert caught.value.field == "source"
    require_packages(["http", "https"])


def test_options_never_show_credentials(options: SourceOptions) -> None:
    """Nor do transports."""
    shown = repr(replace(options, storage={"s3": {"secret": "hush"}}))
    assert "hush" not in shown
    with pytest.raises(ConfigError, match="max_tries"):
        replace(options, max_tries=0)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, DATA])
def test_what_is_no_adapter_is_never_published(
    options: SourceOptions, lib: Library, data: bytes
) -> None:
    """The checks of every other way to load one."""
    assert options.root
    (options.root / "a").write_bytes(data)
    with pytest.raises((GGUFError, AdapterFormatError)):
        opened(options, adapter_check(lib)).fetch("a")
    assert list((options.cache_dir / "blobs").iterdir()) == []


def test_a_real_adapter_passes_the_check(
    options: SourceOptions, lib: Library, tiny_adapter: bytes
) -> None:
    """And loads from the cache."""
    assert options.root
    (options.root / "a.gguf").write_bytes(tiny_adapter)
    with opened(options, adapter_check(lib)).fetch("a.gguf") as got:
        assert got.path.suffix == ".gguf"
        assert got.path.read_bytes() == tiny_adapter


def test_nothing_stays_open(options: SourceOptions) -> None:
    """A closed one gives its lock back, twice is fine."""
    assert options.root
    (options.root / "a").write_bytes(DATA)
    before = len(os.listdir("/proc/self/fd"))
    sources = opened(options)
    for _ in range(5):
        found = sources.fetch("a")
        found.close()
        found.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
