"""The catalogue's adapters for a replica's engine: found by name, fetched, numbered."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from loragraph.cluster.catalogue import Entry, Op
from loragraph.cluster.catalogue_copy import CatalogueCopy
from loragraph.cluster.content import Content, redacted
from loragraph.cluster.sources import Sources
from loragraph.engine.registry import AdapterHeader, LoadOptions, Registry, Stored
from loragraph.errors import InvalidRequestError

T = TypeVar("T")


class SharedCatalogue:
    """A copy of the catalogue for threads; the loop that it belongs to must not wait for them."""

    def __init__(self, copy: CatalogueCopy, loop: asyncio.AbstractEventLoop) -> None:
        self._copy = copy
        self._loop = loop

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name, as far as known here; borrowed."""
        return self._copy.catalogue.entries

    @property
    def dropped(self) -> Collection[str]:
        """Names that were dropped; borrowed."""
        return self._copy.catalogue.dropped

    @property
    def default_mix(self) -> Mapping[str, float] | None:
        """None where nobody has set it yet."""
        return self._copy.catalogue.default_mix

    def name_of(self, number: int) -> str | None:
        """The name of an id."""
        return self._copy.catalogue.name_of(number)

    def refresh(self) -> None:
        """Takes what there is now; blocks."""
        self._wait(self._copy.refresh())

    def change(self, op: Op, name: str = "", **what: Any) -> int:
        """See CatalogueCopy.change; blocks."""
        return self._wait(self._copy.change(op, name, **what))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class CatalogueIds:
    """llama-server's numbers for adapters, the same on all replicas; see server.state.Ids."""

    def __init__(self, catalogue: SharedCatalogue) -> None:
        self._catalogue = catalogue

    def sync(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers of all names that the catalogue has, in their order."""
        found = {name: self._catalogue.entries.get(name) for name in names}
        ids = {name: entry.id for name, entry in found.items() if entry is not None}
        return dict(sorted(ids.items(), key=lambda pair: pair[1]))

    def forget(self, name: str) -> None:
        """The catalogue does that."""

    def name_of(self, number: int) -> str:
        """The name of a number; InvalidRequestError for one that nobody has."""
        name = self._catalogue.name_of(number)
        if name is None:
            raise InvalidRequestError(f"lora: no adapter has the id {number}", param="lora")
        return name


class CatalogueStore:
    """See engine.registry.Store. A file of the folder enters the catalogue when it is asked for."""

    def __init__(
        self,
        catalogue: SharedCatalogue,
        sources: Sources,
        folder: Path | None,
        nowhere: Path,
    ) -> None:
        """`nowhere`: a path that never exists, under which fetched adapters are shown."""
        self._catalogue = catalogue
        self._sources = sources
        self._folder = None if folder is None else Registry(_no_header, folder)
        self._nowhere = nowhere

    def names(self) -> Collection[str]:
        """Of the catalogue, and of the folder's files that it has not dropped."""
        names = set(self._catalogue.entries)
        if self._folder is not None:
            names |= set(self._folder.names()) - set(self._catalogue.dropped)
        return names

    def find(self, name: str) -> Stored | None:
        """What the catalogue has; a file of the folder is registered first. Blocks."""
        entry = self._catalogue.entries.get(name) or self._from_folder(name)
        if entry is None:
            return None
        return Stored(entry.generation, self._shown(entry.content), lambda: self.opened(entry))

    def shown(self, name: str) -> tuple[int, Path] | None:
        """What the catalogue has."""
        entry = self._catalogue.entries.get(name)
        return None if entry is None else (entry.generation, self._shown(entry.content))

    def is_current(self, name: str, number: int) -> bool:
        """By this replica's copy of the catalogue."""
        entry = self._catalogue.entries.get(name)
        return entry is not None and entry.generation == number

    @contextmanager
    def opened(self, entry: Entry) -> Iterator[Path]:
        """An entry's file or folder, verified; fetched where it is not in the cache."""
        content = entry.content
        found = self._sources.cached(content.digest)
        with found or self._sources.fetch(content.source, content.digest) as fetched:
            yield fetched.path

    @contextmanager
    def fetched(self, source: str) -> Iterator[tuple[Content, Path]]:
        """What a source has now: content for the catalogue, and its file or folder."""
        with self._sources.fetch(source) as fetched:
            yield Content(source, fetched.digest, fetched.size_bytes), fetched.path

    def _from_folder(self, name: str) -> Entry | None:
        path = None if self._folder is None else self._folder.path_in_dir(name)
        if path is None or name in self._catalogue.dropped:
            return None
        assert self._folder is not None
        self._folder.check_links(path)
        with self.fetched(str(path)) as (content, _):
            try:
                self._catalogue.change(Op.REGISTER, name, content=content)
            except InvalidRequestError:  # another replica was first
                self._catalogue.refresh()
        return self._catalogue.entries.get(name)

    def _shown(self, content: Content) -> Path:
        if "://" not in content.source:
            return Path(content.source)
        last = urlsplit(redacted(content.source)).path.rstrip("/").rpartition("/")[2]
        return self._nowhere / content.digest[:16] / (last or "adapter")


def _no_header(path: Path, options: LoadOptions) -> AdapterHeader:
    raise AssertionError("the folder is only listed")
