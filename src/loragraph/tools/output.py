"""Files that appear under their name complete or not at all; errors of writing in plain words."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from loragraph.errors import ConfigError, OutputError
from loragraph.tools.gguf_header import same_file

_COPY_BYTES = 1 << 24
_EARLY_BYTES = 1 << 24
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # not on this file system


class OutFile:
    """A file under a temporary name in the folder of its final one; `write` from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
        self._fd = -1

    def open(self) -> None:
        """Makes the file; whoever calls this has seen to close() before, as a signal may come."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        with writing(self.path):
            self._fd = os.open(self._part, flags, 0o666)  # less what the umask forbids

    def reserve(self, nbytes: int) -> None:
        """Takes the space at once, so that a full disk shows before any work is done."""
        with writing(self.path):
            try:
                if nbytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._fd, 0, nbytes)
                    return
            except OSError as exc:
                if exc.errno not in _NO_RESERVATION:
                    raise
            os.ftruncate(self._fd, nbytes)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        with writing(self.path):
            while view:
                n = os.pwrite(self._fd, view, offset)
                view, offset = view[n:], offset + n

    def copy(self, source_fd: int, start: int, nbytes: int, offset: int) -> None:
        """Copies bytes [start, start + nbytes) of an open file to `offset`."""
        with writing(self.path):
            done = self._copy_in_kernel(source_fd, start, nbytes, offset)
            while done < nbytes:
                data = os.pread(source_fd, min(_COPY_BYTES, nbytes - done), start + done)
                if not data:
                    raise OSError("the source became shorter while it was read")
                done += os.pwrite(self._fd, data, offset + done)

    def _copy_in_kernel(self, source_fd: int, start: int, nbytes: int, offset: int) -> int:
        """Bytes that the system copied by itself: 0 where it cannot between these two files."""
        done = 0
        try:
            while done < nbytes and hasattr(os, "copy_file_range"):
                n = os.copy_file_range(
                    source_fd, self._fd, nbytes - done, start + done, offset + done
                )
                if n == 0:
                    break
                done += n
        except OSError:
            pass  # unlike file systems, or one that lacks it; a full disk shows in the plain copy
        return done

    def sync(self) -> None:
        """Waits until the bytes are on the disk."""
        with writing(self.path):
            os.fsync(self._fd)

    def publish(self) -> None:
        """Gives the file its name; replaces what had it."""
        with writing(self.path):
            os.replace(self._part, self.path)

    def close(self) -> None:
        """Closes it; what was not published is removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._part.unlink(missing_ok=True)


class EarlySync:
    """Lets the disk take what is written while the rest is computed, in a thread of its own.

    A context; its error comes out of `wrote` or of the end of the block, never is one lost.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._waiting = 0  # bytes written since it began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._check()

    def wrote(self, file: OutFile, nbytes: int) -> None:
        """Counts bytes written to a file."""
        self._waiting += nbytes
        if self._waiting >= _EARLY_BYTES and (self._running is None or self._running.done()):
            self._check()
            self._waiting = 0
            self._running = self._pool.submit(file.sync)

    def _check(self) -> None:
        if self._running is not None:
            self._running.result()


@contextmanager
def out_files(paths: Sequence[Path]) -> Iterator[list[OutFile]]:
    """Files that are published, the last one first, when the block ends well.

    So of a split model the first part, which is the one that is opened, comes last. An exception
    of any kind, an interruption too, removes all of them.
    """
    with ExitStack() as stack:
        files = []
        for path in paths:
            file = OutFile(path)
            stack.callback(file.close)
            file.open()
            files.append(file)
        yield files
        for file in files:
            file.sync()
        for file in reversed(files):
            file.publish()
        _sync_folder(paths[0].parent)


def _sync_folder(folder: Path) -> None:
    """The new name itself reaches the disk; not every system can do that."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def check_output(out: Path, inputs: Iterable[Path]) -> None:
    """ConfigError where the output would overwrite an input, or is no place for a file."""
    for path in inputs:
        if same_file(out, path):
            raise ConfigError(
                f"expected another file than the input {path}, got {out}",
                field="output",
                hint="write to a new name and rename it afterwards",
            )
    if out.is_dir():
        raise ConfigError(f"expected a file name, got the folder {out}", field="output")
    if out.exists() and not out.is_file():
        raise ConfigError(f"expected the name of a regular file, got {out}", field="output")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder {out.parent} does not exist", field="output")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system reports into OutputError."""
    try:
        yield
    except OSError as exc:
        raise OutputError(
            f"{path}: failed to write: {exc.strerror or exc}",
            hint="nothing stands under this name that did not before",
        ) from exc
