"""Bytes of a file from where it stands, from an offset on: HTTP by the standard library, other
URLs by fsspec (`loragraph[remote]`), which follows redirects without asking and so is not asked
for HTTP. Messages name a source without what signs it.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from loragraph.cluster.content import redacted
from loragraph.errors import ConfigError, PermissionDeniedError, SourceError

SCHEMES = frozenset({"abfs", "az", "file", "gcs", "gs", "hf", "http", "https", "s3"})
"""Allowed unless told otherwise."""

PACKAGES = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "s3": "s3fs",
}
"""What fsspec needs beside itself, by scheme."""

CHUNK_BYTES = 1 << 20
STORE_CHUNK_BYTES = 8 << 20  # of what fsspec reads, where each chunk is a request of its own
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class CutError(SourceError):
    """The transfer ended early; it may be tried again from where it ended."""


class RangeError(CutError):
    """Not the range that was asked for: the content is another one, or ranges are not served."""


class MissingFileError(SourceError):
    """There is no such file, or none that may be read; some servers do not tell them apart."""


class ForbiddenError(MissingFileError):
    """It may not be read, perhaps no longer; or there is none, and that is a secret."""


class FolderError(SourceError):
    """There is a folder of this name in place of a file."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A file's bytes from `start` on, which may be less than was asked for."""

    start: int
    total: int | None  # bytes of the whole file, as far as the server says
    tag: str  # the same as long as the content is; "" where nobody knows
    chunks: Iterator[bytes]


class Transport(Protocol):
    """Opens one kind of URL; a context manager, as it holds a connection."""

    @contextmanager
    def open(self, url: str, start: int, tag: str) -> Iterator[Stream]:
        """From `start` on if the content has `tag` still, else from 0."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one file stands."""

    shown: str  # in messages
    url: str = field(repr=False)  # for `transport`
    transport: Transport

    @contextmanager
    def open(self, start: int, tag: str) -> Iterator[Stream]:
        """As Transport.open()."""
        with self.transport.open(self.url, start, tag) as stream:
            yield stream


@dataclass(frozen=True, slots=True)
class Http:
    """HTTP and HTTPS. `headers` (a token) go to the URL's own host, never to a redirect's."""

    schemes: frozenset[str]
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @contextmanager
    def open(self, url: str, start: int, tag: str) -> Iterator[Stream]:
        """SourceError for an answer that is no file, CutError where trying again may help."""
        first = _parsed(url)
        connection, response = self._response(url, first, start, tag)
        try:
            yield _stream(url, response, start, tag)
        finally:
            response.close()
            connection.close()

    def _response(
        self, url: str, first: SplitResult, start: int, tag: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer of the last redirect."""
        at = url
        for _ in range(_MAX_REDIRECTS + 1):
            self._check_scheme(url, at, first.scheme)
            parts = _parsed(at)
            same = (parts.scheme, parts.netloc) == (first.scheme, first.netloc)
            connection = self._connection(parts)
            try:
                connection.request("GET", _target(parts), headers=self._headers(same, start, tag))
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise CutError(_reason(error), source=redacted(url)) from error
            if response.status not in _REDIRECTS:
                return connection, response
            response.close()
            connection.close()
            at = urljoin(at, response.headers.get("Location", ""))
        raise SourceError(
            f"expected at most {_MAX_REDIRECTS} redirects, got more", source=redacted(url)
        )

    def _check_scheme(self, url: str, at: str, first: str) -> None:
        scheme = at.partition(":")[0].lower()
        downgraded = first == "https" and scheme != "https"
        if scheme not in self.schemes & {"http", "https"} or downgraded:
            raise PermissionDeniedError(
                f"{redacted(url)}: expected to stay with {first}, got sent to {scheme!r:.40}",
                param="source",
            )

    def _connection(self, parts: SplitResult) -> http.client.HTTPConnection:
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)

    def _headers(self, same_host: bool, start: int, tag: str) -> dict[str, str]:
        out = {"Accept-Encoding": "identity", "User-Agent": "loragraph"}
        if start:
            out["Range"] = f"bytes={start}-"
            if tag:
                out["If-Range"] = tag
        return out | dict(self.headers) if same_host else out


_KINDS: dict[int, type[SourceError]] = {
    403: ForbiddenError,
    404: MissingFileError,
    410: MissingFileError,
    416: RangeError,
    **dict.fromkeys((408, 425, 429, 500, 502, 503, 504), CutError),
}
"""What may help against a status; SourceError: nothing."""


def _stream(url: str, response: http.client.HTTPResponse, start: int, tag: str) -> Stream:
    """What an answer's status and headers say."""
    got_tag = _tag(response)
    length = response.headers.get("Content-Length", "")
    if response.status == 200:
        total = int(length) if length.isdecimal() and len(length) < 20 else None
        return Stream(0, total, got_tag, _chunks(url, response))
    if response.status == 206:
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found and int(found[1]) == start and (not tag or got_tag in ("", tag)):
            return Stream(start, int(found[3]), got_tag or tag, _chunks(url, response))
        raise RangeError("expected the range that was asked for", source=redacted(url))
    raise _KINDS.get(response.status, SourceError)(
        f"expected a file, got status {response.status}",
        source=redacted(url),
        hint="does it exist, and has this replica a right to it?",
    )


def _chunks(url: str, response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What has come so far, so that a slow server shows."""
    while True:
        try:
            chunk = response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise CutError(_reason(error), source=redacted(url)) from error
        if not chunk:
            return
        yield chunk


def _tag(response: http.client.HTTPResponse) -> str:
    """A strong ETag, or the time of the last change; a weak one does not go with ranges."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.username is None and url.isprintable()
        _ = parts.port
    except ValueError:
        good = False
    if not good or " " in url:
        raise SourceError(
            "expected a URL with a host and without a user", source=redacted(url)[:200]
        )
    return parts


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _reason(error: Exception) -> str:
    """Of an error without its text where that may hold the URL."""
    said = getattr(error, "strerror", None)
    return f"the transfer failed: {said or type(error).__name__}"


class LocalFile:
    """A file of the shared folder, by its real path; copied, so that a swap in place harms none."""

    @contextmanager
    def open(self, url: str, start: int, tag: str) -> Iterator[Stream]:
        """SourceError for what cannot be read."""
        try:
            # not to wait for the writer of a pipe
            descriptor = os.open(url, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise SourceError("expected a regular file", source=url)
                own = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
                begin = start if tag == own else 0
                file.seek(begin)
                yield Stream(begin, found.st_size, own, _local_chunks(url, file))
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror}", source=url) from error


def _local_chunks(url: str, file: BinaryIO) -> Iterator[bytes]:
    while True:
        try:
            chunk = file.read(CHUNK_BYTES)
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror}", source=url) from error
        if not chunk:
            return
        yield chunk


@dataclass(frozen=True, slots=True)
class FSSpec:
    """Everything that fsspec knows; its packages (s3fs, gcsfs, huggingface_hub) come apart."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @contextmanager
    def open(self, url: str, start: int, tag: str) -> Iterator[Stream]:
        """CutError for whatever may be over the next time, else SourceError."""
        fsspec = _fsspec(redacted(url))
        with _translated(url):
            given = self.options.get(url.partition("://")[0], {})
            files, path = fsspec.core.url_to_fs(url, **given)
            files.invalidate_cache(path)  # file systems live as long as the process, with listings
            found = files.info(path)
        if found.get("type") == "directory":
            raise FolderError("expected a file, got a folder", source=redacted(url))
        with _translated(url):
            file = files.open(path, "rb", cache_type="none")
        try:
            # what it was opened with, if it says so: it may have changed since
            found = getattr(file, "details", None) or found
            got_tag = hashlib.sha256(str(found).encode()).hexdigest()
            begin = start if tag == got_tag else 0
            with _translated(url):
                file.seek(begin)
            yield Stream(begin, found.get("size"), got_tag, _read_chunks(url, file))
        finally:
            file.close()


def require_packages(schemes: Iterable[str]) -> None:
    """ConfigError for the first scheme whose package is not installed."""
    for scheme in schemes:
        if scheme in PACKAGES:
            with _translated(f"{scheme}://"):
                _fsspec(f"{scheme}://").get_filesystem_class(scheme)


def _fsspec(shown: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(
            f"expected fsspec for {shown}, got {error}",
            field="source",
            hint="pip install 'loragraph[remote]'",
        ) from error
    return fsspec


def _read_chunks(url: str, file: Any) -> Iterator[bytes]:
    while True:
        with _translated(url):
            chunk = file.read(STORE_CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """A file system may raise anything, with credentials in it: only its kind is told."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ConfigError(
            f"expected a package for {redacted(url)}, got none: {error}",
            field="source",
            hint=f"pip install {PACKAGES.get(scheme, f'what fsspec needs for {scheme}://')}",
        ) from error
    except FileNotFoundError as error:
        raise MissingFileError("there is no such file", source=redacted(url)) from error
    except PermissionError:
        raise ForbiddenError(
            "it may not be read",
            source=redacted(url),
            hint="which credentials does this replica have?",
        ) from None
    except (NotImplementedError, TypeError, ValueError) as error:
        raise _failed(SourceError, url, error) from None
    except Exception as error:  # noqa: BLE001 - each plug-in has errors of its own
        raise _failed(CutError, url, error) from None


def _failed(kind: type[SourceError], url: str, error: Exception) -> SourceError:
    return kind(f"the file system failed: {type(error).__name__}", source=redacted(url))
