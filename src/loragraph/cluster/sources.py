"""Adapters from a shared folder or a URL into the disk cache: bounded, resumed, verified, once."""

from __future__ import annotations

import contextlib
import hashlib
import re
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
from loragraph.cluster.cache import DiskCache, Fetched, digest_of, wrong_digest
from loragraph.cluster.content import redacted
from loragraph.cluster.folder import FolderFetch
from loragraph.cluster.transfer import Transfer, late
from loragraph.cluster.transports import (
    SCHEMES,
    CutError,
    FolderError,
    ForbiddenError,
    FSSpec,
    Http,
    LocalFile,
    Origin,
)
from loragraph.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LoragraphError,
    PermissionDeniedError,
)
from loragraph.ggml.lib import Library

Check = Callable[[Path], object]
"""Raises for a file or folder that is no adapter."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.DOTALL)


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
        self,
        options: SourceOptions,
        check: Check,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check` sees each file before it is used; see adapter_check()."""
        self._options = options
        self._check = check
        self._sleep = sleep
        self._clock = clock
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
                raise late(redacted(source), self._options.max_fetch_s) from error
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
        options = self._options
        transfer = Transfer(
            options.max_file_bytes,
            options.max_tries,
            options.max_fetch_s,
            self._clock() + options.max_fetch_s,
            self._sleep,
            self._clock,
        )
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        with self._cache.locked(key[:3], options.max_fetch_s):
            if digest and (found := self._cache.get(digest)):
                return found  # another process was first
            try:
                part = self._fetch_part(source, key, transfer, can_mix=bool(digest))
                got = digest_of(part)
                if digest and got != digest:
                    raise wrong_digest(redacted(source), digest, got)
                self._check(part)
                fetched = self._cache.publish(part, got)
            except (CutError, DeadlineError, ForbiddenError):
                raise  # the next fetch goes on with what has come
            except LoragraphError:
                self._cache.discard(key)
                raise
            self._cache.discard(key)
            return fetched

    def _fetch_part(self, source: str, key: str, transfer: Transfer, *, can_mix: bool) -> Path:
        """A file, or a folder: where the URL does not say so, its store may."""
        file, folder = self._cache.parts / f"{key}.part", self._cache.parts / f"{key}.folder"
        if not self._is_folder(source):
            with contextlib.suppress(FolderError):
                limit = self._options.max_file_bytes
                transfer.file(self._origin(source), file, limit, can_mix=can_mix)
                return file
        shown = redacted(source)
        FolderFetch(transfer, lambda n: self._origin(_inside(source, n)), folder, shown).run()
        return folder

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

    def _origin(self, source: str) -> Origin:
        scheme, shown = _scheme(source), redacted(source)
        if scheme == "file":
            return Origin(shown, str(self._confined(source)), LocalFile())
        storage = self._options.storage
        if scheme in ("http", "https"):
            headers = storage.get(scheme, {}).get("headers", {})
            http = Http(self._options.schemes, self._options.timeout_s, headers)
            return Origin(shown, source, http)
        return Origin(shown, source, FSSpec(storage))


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
