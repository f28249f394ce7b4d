"""Adapters from a shared folder or a URL into the disk cache: bounded, resumed, verified, once."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from loragraph.adapters.convert.safetensors import read_header as read_safetensors_header
from loragraph.adapters.convert.source import locate, read_config
from loragraph.adapters.gguf import read_header as read_gguf_header
from loragraph.cluster.cache import DiskCache, Fetched, digest_of, size_of, writing, wrong_digest
from loragraph.cluster.content import redacted
from loragraph.cluster.folder import take_folder
from loragraph.cluster.transports import (
    SCHEMES,
    CutError,
    FSSpec,
    Http,
    LocalFile,
    MissingFileError,
    Stream,
    Transport,
)
from loragraph.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LoragraphError,
    PermissionDeniedError,
    SourceError,
)
from loragraph.ggml.lib import Library

Check = Callable[[Path], object]
"""Raises for a file or folder that is no adapter."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.DOTALL)
_MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Where adapters may come from, and how much of them is kept."""

    cache_dir: Path
    root: Path | None = None  # the shared folder; paths and file:// stay inside it
    schemes: frozenset[str] = SCHEMES
    max_file_bytes: int = 4 * 2**30
    max_cache_bytes: int = 64 * 2**30
    timeout_s: float = 30.0  # of a connection that says nothing
    max_fetch_s: float = 900.0
    max_tries: int = 5  # without a byte more
    storage: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """By scheme: fsspec's options; {"headers": {…}} for http and https."""

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_cache_bytes", "timeout_s", "max_fetch_s", "max_tries"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"expected more than 0, got {getattr(self, name)}", field=name)


class Sources:
    """Fetches adapters; for any thread."""

    def __init__(
        self, options: SourceOptions, check: Check, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`check` sees each file before it is used; see adapter_check()."""
        self._options = options
        self._check = check
        self._sleep = sleep
        self._cache = DiskCache(options.cache_dir, options.max_cache_bytes)
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], Future[str]] = {}

    def cached(self, digest: str) -> Fetched | None:
        """What is there already of this content, whatever has become of its source."""
        return self._cache.get(digest)

    def fetch(self, source: str, digest: str = "") -> Fetched:
        """An adapter in the cache, in use until it is closed; blocks.

        With a digest, what is there already is not asked for again. PermissionDeniedError for a
        scheme or a path that is not allowed, SourceError where it cannot be had or is too large,
        with status 409 where it has another digest, DeadlineError, CapacityError for no room;
        what the check raises.
        """
        self._check_source(source)
        while True:
            if digest and (found := self._cache.get(digest)):
                return found
            done = self._once(source, digest)
            if isinstance(done, Fetched):
                return done
            if (found := self._cache.get(done)) is not None:
                return found
            digest = done  # evicted at once: again

    def _once(self, source: str, digest: str) -> Fetched | str:
        """What this call fetched, or the digest of what one did that was running already."""
        key = (source, digest)
        with self._lock:
            running = self._running.get(key)
            if running is None:
                future: Future[str] = Future()
                self._running[key] = future
        if running is not None:
            try:
                return running.result(2 * self._options.max_fetch_s)
            except TimeoutError as error:
                raise self._late(source) from error
        try:
            fetched = self._fetch(source, digest)
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(fetched.digest)
            return fetched
        finally:
            with self._lock:
                del self._running[key]

    def _fetch(self, source: str, digest: str) -> Fetched:
        deadline = time.monotonic() + self._options.max_fetch_s
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        with self._cache.locked(key[:3], self._options.max_fetch_s):
            if digest and (found := self._cache.get(digest)):
                return found  # another process was first
            part = self._cache.parts / f"{key}.part"
            if self._is_folder(source):
                self._fetch_folder(source, part, deadline)
            else:
                limit = self._options.max_file_bytes
                self._fetch_file(source, part, deadline, limit, can_mix=bool(digest))
            got = digest_of(part)
            try:
                if digest and got != digest:
                    raise wrong_digest(redacted(source), digest, got)
                self._check(part)
                return self._cache.publish(part, got)
            finally:
                _discard(part)

    def _fetch_folder(self, source: str, part: Path, deadline: float) -> None:
        """The files of an adapter; one that is there from an earlier try is resumed."""
        with writing(part):
            _discard(part)
            part.mkdir()

        def take(name: str) -> bool:
            self._check_time(source, deadline)  # empty files have no chunk after which it is asked
            file = self._cache.parts / f"{part.name}.{name}"
            left = self._options.max_file_bytes - size_of(part)
            try:
                self._fetch_file(_inside(source, name), file, deadline, left, can_mix=False)
            except (MissingFileError, InvalidRequestError):
                _discard(file)
                return False
            with writing(part):
                file.replace(part / name)
            _discard(file)
            return True

        def is_there(name: str) -> bool:
            try:
                inside = _inside(source, name)
                with self._transport(inside).open(self._url(inside), 0, ""):
                    return True
            except (MissingFileError, InvalidRequestError):
                return False

        try:
            take_folder(part, take, is_there, redacted(source))
        except LoragraphError:
            _discard(part)
            raise

    def _fetch_file(
        self, source: str, part: Path, deadline: float, limit: int, *, can_mix: bool
    ) -> None:
        """Into `part`, on from what is there of it; `can_mix`: a digest tells if that was wrong."""
        n_failures, url = 0, self._url(source)
        transport = self._transport(source)
        with writing(part):
            part.touch(mode=0o600)
        while True:
            have = part.stat().st_size
            tag = _read_tag(part)
            start = have if tag or can_mix else 0
            try:
                with transport.open(url, start, tag) as stream:
                    self._take(source, stream, part, deadline, limit)
                return
            except CutError:
                n_failures = 1 if part.stat().st_size > have else n_failures + 1
                if n_failures >= self._options.max_tries:
                    raise
                if part.stat().st_size <= have:  # nothing came: perhaps the range is refused
                    _discard(part)
                    part.touch(mode=0o600)
            self._wait(source, n_failures, deadline)

    def _take(self, source: str, stream: Stream, part: Path, deadline: float, limit: int) -> None:
        """Writes a stream; CutError where it is shorter than it said."""
        if stream.total is not None and stream.total > limit:
            _discard(part)
            raise self._too_large(source, stream.total)
        with writing(part), open(part, "r+b") as file:
            file.truncate(stream.start)
            file.seek(stream.start)
            _tag_path(part).write_text(stream.tag, encoding="utf-8")
            n_bytes = stream.start
            for chunk in stream.chunks:
                n_bytes += len(chunk)
                if n_bytes > limit:
                    _discard(part)
                    raise self._too_large(source, n_bytes)
                file.write(chunk)
                self._check_time(source, deadline)
        if stream.total is not None and n_bytes != stream.total:
            raise CutError(f"expected {stream.total} bytes, got {n_bytes}", source=redacted(source))

    def _wait(self, source: str, n_failures: int, deadline: float) -> None:
        self._check_time(source, deadline)
        self._sleep(min(0.05 * 2**n_failures, _MAX_BACKOFF_S))

    def _check_time(self, source: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise self._late(source)

    def _late(self, source: str) -> DeadlineError:
        return DeadlineError(
            f"{redacted(source)}: expected to have it within {self._options.max_fetch_s:g} s",
            hint="what is there of it is kept, so asking again goes on from there",
        )

    def _too_large(self, source: str, size: int) -> SourceError:
        return SourceError(
            f"expected at most {self._options.max_file_bytes} bytes, got {size} or more",
            source=redacted(source),
        )

    def _check_source(self, source: str) -> None:
        """Its scheme is allowed; a path lies inside the shared folder."""
        if "::" in source or "\0" in source:
            raise PermissionDeniedError(
                f"source: expected a path or one URL, got {redacted(source)!r:.200}",
                param="source",
            )
        try:
            urlsplit(source)
        except ValueError as error:
            raise InvalidRequestError("source: expected a URL", param="source") from error
        scheme = _scheme(source)
        allowed = self._options.schemes
        if scheme not in allowed:
            raise PermissionDeniedError(
                f"source: expected one of {', '.join(sorted(allowed))}, got {scheme!r:.40}",
                param="source",
            )
        if scheme == "file":
            self._confined(source)

    def _confined(self, source: str) -> Path:
        """The real path inside the shared folder; links are followed first."""
        root = self._options.root
        if root is None:
            raise PermissionDeniedError(
                "source: expected a URL, got a path, and there is no shared folder", param="source"
            )
        given = unquote(urlsplit(source).path) if "://" in source else source
        root = root.resolve()
        try:
            real = (root / given).resolve()
            inside = real.is_relative_to(root) and real != root
            found = inside and real.exists()
        except (OSError, ValueError, RuntimeError):  # too long, links in a circle
            inside = found = False
        if not inside:
            raise PermissionDeniedError(
                f"source: expected a path inside the shared folder, got {given!r:.200}",
                param="source",
            )
        if not found:
            raise InvalidRequestError(
                f"source: there is no {given!r:.200} in the shared folder", param="source"
            )
        return real

    def _is_folder(self, source: str) -> bool:
        if _scheme(source) == "file":
            return self._confined(source).is_dir()
        return urlsplit(source).path.endswith("/")

    def _url(self, source: str) -> str:
        return str(self._confined(source)) if _scheme(source) == "file" else source

    def _transport(self, source: str) -> Transport:
        scheme = _scheme(source)
        if scheme == "file":
            return LocalFile()
        storage = self._options.storage
        if scheme in ("http", "https"):
            headers = storage.get(scheme, {}).get("headers", {})
            return Http(self._options.schemes, self._options.timeout_s, headers)
        return FSSpec(storage)


def adapter_check(lib: Library) -> Check:
    """The checks that need no base: a GGUF adapter's header, or a PEFT folder's two."""

    def check(path: Path) -> None:
        if path.is_dir():
            location = locate(path)
            read_config(location)
            for file in location.weights:
                read_safetensors_header(file)
        else:
            read_gguf_header(lib, path, None)

    return check


def _scheme(source: str) -> str:
    found = _URL.fullmatch(source)
    return found[1] if found else ("file" if "://" not in source else "")


def _inside(folder: str, name: str) -> str:
    """A file of a folder, in front of the query of a URL."""
    head, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def _tag_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def _read_tag(part: Path) -> str:
    try:
        return _tag_path(part).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _discard(part: Path) -> None:
    """A part and its tag."""
    _tag_path(part).unlink(missing_ok=True)
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
