"""The catalogue on disk, in a folder that all replicas see: a snapshot, then a line a change.

A change is on disk before anybody learns of it, so whoever reads the file after a crash knows all
that was ever told to anyone. A last line without its end was never told, and is left out. One
process writes at a time; a lock that ends with it says which.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from loragraph.cluster.catalogue import Catalogue, Change
from loragraph.errors import CapacityError, FormatError, LifecycleError, OutputError

FILE = "catalogue.jsonl"
_LOCK = "catalogue.lock"
_FORMAT = 1
_MAX_FILE_BYTES = 2 * 2**30
_MAX_LINE_BYTES = 1 << 19  # of a change; a mix of 256 names of 128 characters, escaped
_MIN_CHANGES = 1000  # before the log is folded into a new snapshot


class CatalogueFile:
    """The one writer. One thread at a time; close() it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Opens or makes the catalogue of a folder.

        CapacityError where another process writes it, FormatError where the file is damaged,
        OutputError where it cannot be written.
        """
        self._folder = Path(folder)
        self._path = self._folder / FILE
        with _writing(self._path):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._folder / _LOCK)
        try:
            self.catalogue, n_bytes, self._n_changes = _read(self._path)
            with _writing(self._path):
                self._file = self._opened(n_bytes)
        except BaseException:
            os.close(self._lock)
            raise
        self._failed = False

    def commit(self, change: Change) -> None:
        """Writes a change, and applies it; OutputError leaves both as they were."""
        if self._failed or self._file.closed:
            raise LifecycleError("the catalogue's file is closed, or could not be put in order")
        line = _line(change.to_json())
        end = self._file.tell()
        try:
            with _writing(self._path):
                _write(self._file, line)
        except OutputError:
            self._take_back(end)
            raise
        self.catalogue.apply([change])
        self._n_changes += 1
        if self._n_changes > max(_MIN_CHANGES, len(self.catalogue.entries)):
            self.compact()

    def compact(self) -> None:
        """Replaces the file by a snapshot; OutputError leaves the old one in use."""
        new = self._path.with_suffix(".new")
        with _writing(new):
            file = _create(new)
            try:
                _write(file, _line({"format": _FORMAT, **self.catalogue.snapshot()}))
                new.replace(self._path)
            except OSError:
                file.close()
                raise
            self._file.close()
            self._file, self._n_changes = file, 0
            _sync(self._folder)

    def close(self) -> None:
        """Lets another process write; twice is fine."""
        if not self._file.closed:
            self._file.close()
            os.close(self._lock)

    def __enter__(self) -> CatalogueFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self, n_bytes: int) -> FileIO:
        """The file behind what is good of it, to be appended to."""
        if not n_bytes:
            file = _create(self._path)
            _write(file, _line({"format": _FORMAT, **self.catalogue.snapshot()}))
        else:
            file = FileIO(self._path, "r+")
            file.truncate(n_bytes)
            file.seek(n_bytes)
        _sync(self._folder)
        return file

    def _take_back(self, end: int) -> None:
        """Removes what of a line was written; nothing is written any more where that fails."""
        try:
            self._file.truncate(end)
            self._file.seek(end)
        except OSError:
            self._failed = True


def read_catalogue(folder: str | os.PathLike[str]) -> Catalogue:
    """What stands in a folder, for any process while another one writes; empty for nothing.

    FormatError where the file is damaged or cannot be read.
    """
    return _read(Path(folder) / FILE)[0]


def _read(path: Path) -> tuple[Catalogue, int, int]:
    """The catalogue, the bytes that it takes, and how many changes are among them."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
                raise FormatError(f"expected at most {_MAX_FILE_BYTES} bytes, got more", path=path)
            head = file.readline()
            if not head.endswith(b"\n"):  # its first writer never got to tell anyone
                return Catalogue(), 0, 0
            catalogue = _snapshot(path, head)
            n_bytes, n_changes = len(head), 0
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 2):
                if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                    break
                _apply(catalogue, path, number, line)
                n_bytes += len(line)
                n_changes += 1
            return catalogue, n_bytes, n_changes
    except FileNotFoundError:
        return Catalogue(), 0, 0
    except OSError as error:
        raise FormatError(str(error.strerror), path=path) from error


def _snapshot(path: Path, line: bytes) -> Catalogue:
    found = _parsed(path, 1, line)
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise FormatError(f"expected a catalogue of format {_FORMAT}", path=path, where="line 1")
    try:
        return Catalogue.from_snapshot(found)
    except FormatError as error:
        raise FormatError(str(error), path=path, where="line 1") from error


def _apply(catalogue: Catalogue, path: Path, number: int, line: bytes) -> None:
    try:
        change = Change.from_json(_parsed(path, number, line))
        if change.version != catalogue.version + 1:
            raise FormatError(f"expected version {catalogue.version + 1}, got {change.version}")
        catalogue.apply([change])
    except FormatError as error:
        if error.path:
            raise
        raise FormatError(str(error), path=path, where=f"line {number}") from error


def _parsed(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"expected a line of JSON: {error!s:.100}", path=path, where=f"line {number}"
        ) from error


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _create(path: Path) -> FileIO:
    """An empty file that only its owner reads, as sources may be signed URLs."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "r+")


def _write(file: FileIO, line: bytes) -> None:
    """Past every cache; nothing of it waits in a buffer where that fails."""
    view = memoryview(line)
    while view:
        view = view[file.write(view) or 0 :]
    os.fsync(file.fileno())


def _locked(path: Path) -> int:
    """A lock that its holder's end releases, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CapacityError(
            f"{path.parent}: expected no other writer of the catalogue, got one that runs",
            hint="it lets go when it ends; others read the file without it",
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync(folder: Path) -> None:
    """Makes a new name in a folder survive the machine; some file systems cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror}", hint="is there room, and permission?"
        ) from error
