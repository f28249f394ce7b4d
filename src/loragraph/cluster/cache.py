"""Fetched adapters on local disk, by content digest; for the threads and processes of a machine.

A file is complete and verified before it has its name. What is in use is locked (shared), and an
eviction takes only what it can lock alone; locks end with their process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from loragraph.errors import CapacityError, OutputError, SourceError

_READ_BYTES = 1 << 20
_POLL_S = 0.05
_MAX_PART_AGE_S = 86_400.0


@dataclass(slots=True)
class Fetched:
    """An adapter in the cache; it stays there until close()."""

    path: Path  # a GGUF file, or a PEFT folder
    digest: str
    size_bytes: int
    _lock: int = field(repr=False, default=-1)

    def close(self) -> None:
        """It may be evicted; twice is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Fetched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class DiskCache:
    """A folder of files by digest, the least recently used ones of which go first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """OutputError where the folder cannot be made."""
        self.blobs, self.parts = folder / "blobs", folder / "parts"
        self._max_bytes = max_bytes
        self._verified: set[str] = set()  # by this process
        with writing(folder):
            for each in (self.blobs, self.parts):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in self.parts.iterdir():  # nobody came back for it
                if part.suffix != ".lock" and _last_use(part) < time.time() - _MAX_PART_AGE_S:
                    _remove(part)

    def get(self, digest: str) -> Fetched | None:
        """What has this content, in use from now on; None for nothing. A damaged one is removed."""
        for path in (self.blobs / f"{digest}.gguf", self.blobs / digest):
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if not _is_at(lock, path):  # evicted while it was being opened
                    os.close(lock)
                    continue
                if digest not in self._verified:
                    if digest_of(path) != digest:
                        os.close(lock)
                        _remove(path)
                        continue
                    self._verified.add(digest)
                os.utime(path)
                return Fetched(path, digest, size_of(path), lock)
        return None

    def publish(self, part: Path, digest: str) -> Fetched:
        """Gives a verified file or folder its name; CapacityError where there is no room."""
        name = digest if part.is_dir() else f"{digest}.gguf"
        with self.locked("publish", 600.0):
            if not (self.blobs / name).exists():
                self._make_room(size_of(part))
                with writing(part):
                    _sync(part)
                    part.rename(self.blobs / name)
                    _sync(self.blobs)
                self._verified.add(digest)
            else:
                _remove(part)
            found = self.get(digest)
        assert found is not None
        return found

    @contextlib.contextmanager
    def locked(self, name: str, timeout_s: float) -> Iterator[None]:
        """Alone with a name, in all processes; CapacityError when the time is over."""
        deadline = time.monotonic() + timeout_s
        with writing(self.parts):
            lock = os.open(self.parts / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise CapacityError(f"expected to fetch within {timeout_s:g} s, got no turn")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    def discard(self, key: str) -> None:
        """Whatever there is of an unfinished fetch: names that begin with `key` and a dot."""
        for path in self.parts.glob(f"{key}.*"):
            _remove(path)

    def used_bytes(self) -> int:
        """Bytes of all that is complete."""
        return sum(size_of(path) for path in self.blobs.iterdir())

    def _make_room(self, n_bytes: int) -> None:
        """Evicts until n_bytes fit."""
        used = self.used_bytes()
        fits = n_bytes <= self._max_bytes
        for path in sorted(self.blobs.iterdir(), key=_last_use) if fits else ():
            if used + n_bytes <= self._max_bytes:
                return
            size = size_of(path)
            if _evict(path):
                used -= size
        if used + n_bytes > self._max_bytes:
            raise CapacityError(
                f"the cache of adapters: expected room for {n_bytes} bytes, got "
                f"{max(self._max_bytes - used, 0)} of {self._max_bytes}; the rest is in use",
                hint="let it have more, or use fewer adapters at once",
            )


def digest_of(path: Path) -> str:
    """SHA-256 of a file; of a folder that of a line `name size digest` for each file, sorted."""
    if path.is_dir():
        lines = [f"{one.name} {size_of(one)} {digest_of(one)}\n" for one in sorted(path.iterdir())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file or of a folder's files; 0 for what has gone."""
    try:
        if path.is_dir():
            return sum(size_of(one) for one in path.iterdir())
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """OutputError for what the disk says."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror}", hint="is there room, and permission?"
        ) from error


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still means what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _evict(path: Path) -> bool:
    """Removes what nobody uses."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _try_lock(lock):
            return False
        _remove(path)
        return True
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    for one in sorted(path.iterdir()) if path.is_dir() else ():
        if one.is_file() and path.parent.name == "parts":
            _sync(one)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wrong_digest(source: str, expected: str, got: str) -> SourceError:
    """Of a file that is not what was registered."""
    error = SourceError(
        f"expected the content {expected[:12]}, got {got[:12]}",
        source=source,
        hint="was it overwritten? swap the adapter to serve the new content",
    )
    error.status = 409
    return error
