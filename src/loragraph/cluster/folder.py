"""An adapter of PEFT or MLX in a folder somewhere else. URLs have no lists, so its files are asked
for by their names, one after the other; weights that were pickled are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from loragraph.adapters.convert.source import CONFIG, INDEX, PICKLED, WEIGHTS, shard_names
from loragraph.cluster.cache import size_of, writing
from loragraph.cluster.transfer import Transfer, discard, read_tag
from loragraph.cluster.transports import ForbiddenError, MissingFileError, Origin
from loragraph.errors import InvalidRequestError, SourceError, UnsupportedError

_MISSING = (MissingFileError, InvalidRequestError)  # the latter: of a shared folder


class FolderFetch:
    """Fetches one folder. Complete files of an earlier try are kept if they are what is there now;
    each stands in the folder, its tag beside it where the file was while it came.
    """

    def __init__(
        self, transfer: Transfer, origin: Callable[[str], Origin], folder: Path, source: str
    ) -> None:
        """`origin` names a file of the folder, `source` is the folder in messages."""
        self._transfer = transfer
        self._origin = origin
        self._folder = folder
        self._source = source
        self._sizes: dict[str, int] = {}  # of the files that belong to it

    def run(self) -> None:
        """Afterwards the folder holds the adapter's files and nothing else.

        SourceError for a folder without configuration or weights or with too many bytes,
        UnsupportedError for pickled weights, AdapterFormatError for an index that is none, and
        what Transfer.file raises.
        """
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            os.utime(self._folder)  # in use, however old
        self._take_files()
        with writing(self._folder):
            for path in self._folder.iterdir():
                if path.name not in self._sizes:  # of another version
                    path.unlink()

    def _take_files(self) -> None:
        if not self._has(CONFIG):
            raise SourceError(
                f"expected a folder of PEFT or MLX, got none with a file {CONFIG} that can be read",
                source=self._source,
            )
        if any(self._has(name) for name in WEIGHTS):
            return
        if self._has(INDEX):
            for name in shard_names(self._folder):
                self._take_shard(name)
            return
        self._refuse_pickled()
        raise SourceError(
            f"expected weights beside {CONFIG}: one of {', '.join((*WEIGHTS, INDEX))}",
            source=self._source,
        )

    def _has(self, name: str) -> bool:
        """Takes a file; False where there is none of that name, or none that may be read."""
        try:
            self._take(name)
        except _MISSING:
            return False
        return True

    def _take_shard(self, name: str) -> None:
        try:
            self._take(name)
        except ForbiddenError:  # not anymore, or not yet: what has come stays
            raise
        except _MISSING as error:
            message = f"expected {name}, which {INDEX} names"
            raise SourceError(message, source=self._source) from error

    def _take(self, name: str) -> None:
        """Into the folder, unless it is there."""
        origin = self._origin(name)
        self._transfer.check_time(origin)  # empty files have no chunk after which it is asked
        whole = self._folder / name
        part = self._folder.with_name(f"{self._folder.name}.{name}")
        if not (whole.exists() and self._transfer.is_current(origin, whole, read_tag(part))):
            if whole.exists():
                discard(part)
                whole.unlink()
            limit = self._transfer.max_bytes - sum(self._sizes.values())
            self._transfer.file(origin, part, limit)
            with writing(whole):
                part.replace(whole)
        self._sizes[name] = size_of(whole)

    def _refuse_pickled(self) -> None:
        for name in PICKLED:
            if self._is_there(name):
                raise UnsupportedError(
                    f"{self._source}: holds pickled weights, {name}, which are not read on the way",
                    what="pickled weights",
                    hint="loragraph convert reads them where torch is installed",
                )

    def _is_there(self, name: str) -> bool:
        """Asks without fetching."""
        try:
            with self._origin(name).open(0, ""):
                return True
        except _MISSING:
            return False
