"""The files of one model: a GGUF file or all parts of a split one, read and mapped."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from loragraph.errors import BackendError, GGUFError, LifecycleError
from loragraph.ggml.gguf import GGUFFile, TensorInfo
from loragraph.ggml.lib import Library

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_MAX_SPLITS = 65535


def split_paths(path: Path) -> list[Path]:
    """All files of the split model that `path` names a part of, in order; [path] for another name.

    The name alone decides: nothing is opened.
    """
    match = _SPLIT_NAME.match(path.name)
    if match is None or not 1 <= int(match["no"]) <= int(match["count"]):
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


class ModelFiles:
    """Metadata of the first part, tensor infos of all, and read-only maps of their bytes."""

    def __init__(self, lib: Library, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lib = lib
        self._maps: dict[Path, _Map] = {}
        self._closed = False
        self.metadata = GGUFFile(lib, self.path)
        try:
            self.tensors = dict(self.metadata.tensors)
            self.paths = [self.path, *self._read_other_parts()]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and closes everything; no tensor may live in the maps any more."""
        self._closed = True
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        self.metadata.close()

    def address(self, path: Path) -> int:
        """Address of the first byte of a mapped file."""
        return self._map(path).address

    def mapped_bytes(self, path: Path) -> int:
        """Size of a mapped file in bytes."""
        return self._map(path).nbytes

    def pointer(self, info: TensorInfo) -> Any:
        """A C pointer to a tensor's bytes in its map."""
        mapped = self._map(info.path)
        if info.offset + info.nbytes > mapped.nbytes:
            raise GGUFError("the file became shorter while it was read", path=info.path)
        return self._lib.ffi.cast("void *", mapped.address + info.offset)

    def check_sizes(self) -> None:
        """GGUFError where a mapped file has become shorter: reading its lost pages would kill.

        One system call a file; it cannot see a file that shrinks while a step reads it.
        """
        for path, mapped in self._maps.items():
            if mapped.current_bytes() < mapped.nbytes:
                raise GGUFError(
                    f"the file became shorter while it was in use: expected {mapped.nbytes} "
                    f"bytes, got {mapped.current_bytes()}",
                    path=path,
                    hint="replace a model file by renaming a new one over it",
                )

    def release(self, info: TensorInfo) -> None:
        """Tells the system that a tensor's pages, copied elsewhere, need no memory any more."""
        self._map(info.path).release(info.offset, info.nbytes)

    def _map(self, path: Path) -> _Map:
        if self._closed:
            raise LifecycleError(f"the files of {self.path} were closed")
        if path not in self._maps:
            self._maps[path] = _Map(path)
        return self._maps[path]

    def _read_other_parts(self) -> list[Path]:
        """Adds the tensors of parts 2 … n of a split model (keys split.no, split.count)."""
        count = self.metadata.integer("split.count", default=0, high=_MAX_SPLITS)
        if count <= 1:
            return []
        number = self.metadata.integer("split.no", high=_MAX_SPLITS)
        first, *paths = split_paths(self.path)
        if number != 0 or self.path != first or len(paths) != count - 1:
            raise GGUFError(
                f"expected the first part of a model split in {count}, named "
                f"…-00001-of-{count:05}.gguf, got part {number + 1}",
                path=self.path,
                hint="give the path of the first part",
            )
        for i, path in enumerate(paths, start=1):
            with GGUFFile(self._lib, path) as part:
                self._add_part(part, i, count)
        self._check_total()
        return paths

    def _add_part(self, part: GGUFFile, number: int, count: int) -> None:
        found = (
            part.integer("split.no", high=_MAX_SPLITS),
            part.integer("split.count", high=_MAX_SPLITS),
        )
        if found != (number, count):
            raise GGUFError(
                f"expected part {number + 1} of {count}, got part {found[0] + 1} of {found[1]}",
                path=part.path,
                where="split.no",
            )
        twice = self.tensors.keys() & part.tensors.keys()
        if twice:
            raise GGUFError("this tensor stands in two parts", path=part.path, where=min(twice))
        self.tensors |= part.tensors

    def _check_total(self) -> None:
        key = "split.tensors.count"
        if key not in self.metadata:
            return
        expected = self.metadata.integer(key)
        if expected != len(self.tensors):
            raise GGUFError(
                f"expected {expected} tensors in all parts, got {len(self.tensors)}",
                path=self.path,
                where=key,
            )


class _Map:
    """One file mapped read-only.

    A map shows what the file holds at the time of reading: who writes into the file changes the
    weights, and who truncates it lets the system end the process (SIGBUS) at the next read of a
    lost page. Renaming another file over it is safe.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._mmap: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as exc:
            raise BackendError(f"{path} cannot be mapped: {exc.strerror}") from exc
        except ValueError as exc:  # an empty file
            raise GGUFError("the file became shorter while it was read", path=path) from exc
        self.nbytes = len(self._mmap)
        view = np.frombuffer(self._mmap, np.uint8)
        self.address = int(view.ctypes.data)
        del view  # a live view would forbid close()

    def current_bytes(self) -> int:
        """Size of the file now."""
        if self._mmap is None:
            raise LifecycleError("a model file was used after its close")
        return self._mmap.size()

    def release(self, offset: int, nbytes: int) -> None:
        """Drops whole pages inside [offset, offset + nbytes); they are read again if touched."""
        if self._mmap is None:
            raise LifecycleError("a model file was used after its close")
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mmap.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Unmaps the file."""
        mapped, self._mmap = self._mmap, None
        if mapped is not None:
            mapped.close()
