"""A process's copy of the catalogue, kept up to date from the hub. For one event loop.

Where the hub does not answer, the file is read: a change is there before anybody learns of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from loragraph.cluster.catalogue import Catalogue, Change, Op
from loragraph.cluster.catalogue_file import FILE, read_catalogue
from loragraph.cluster.catalogue_hub import LEASE_S
from loragraph.cluster.content import Content
from loragraph.errors import FormatError, StaleCatalogueError

_MARGIN_S = 0.5  # of a lease, for clocks that run unlike
_WAIT_S = LEASE_S / 4
_RETRY_S = 0.2
_CHANGE_TRIES_S = 30.0


class HubLostError(StaleCatalogueError):
    """The hub does not answer: it has died, is being started again, or cannot be reached."""


class Hub(Protocol):
    """CatalogueHub, wherever it runs. Raises HubLostError beside what that raises."""

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        """See CatalogueHub."""

    async def change(
        self,
        op: str,
        name: str = "",
        *,
        content: Mapping[str, Any] | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        """See CatalogueHub."""


OnChange = Callable[[Catalogue, frozenset[str]], None]
"""Called with the new state and the names whose content is another, or gone, or pinned anew."""


class CatalogueCopy:
    """The copy; run `follow()` beside it."""

    def __init__(
        self,
        hub: Hub,
        who: str,
        folder: Path,
        *,
        lease: bool = False,
        on_change: OnChange = lambda catalogue, names: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`who`: a name that no other copy has; `folder`: where the hub keeps its file."""
        self.catalogue = Catalogue()
        self._hub = hub
        self._who = who
        self._folder = folder
        self._lease = lease
        self._on_change = on_change
        self._clock = clock
        self._fresh_until = 0.0
        self._lock = asyncio.Lock()
        self._file_tag: tuple[int, int, int] | None = None

    @property
    def version(self) -> int:
        """How much of it is known."""
        return self.catalogue.version

    async def follow(self) -> None:
        """Takes every change as it comes; until cancelled."""
        while True:
            try:
                await self._poll(_WAIT_S)
            except HubLostError:
                with suppress(FormatError):
                    await self._read_file()
                await asyncio.sleep(_RETRY_S)

    async def current(self) -> Catalogue:
        """The catalogue as of now: no change that was told as done to anybody is missing.

        StaleCatalogueError where that cannot be known.
        """
        if self._clock() >= self._fresh_until:
            async with self._lock:
                if self._clock() >= self._fresh_until:
                    await self._refresh()
        return self.catalogue

    async def at_least(self, version: int) -> None:
        """Refreshes a copy that is older; StaleCatalogueError where that fails."""
        if self.version >= version:
            return
        async with self._lock:
            if self.version < version:
                await self._refresh()
        if self.version < version:
            raise StaleCatalogueError(
                f"expected version {version} of the catalogue, got {self.version}"
            )

    async def refresh(self) -> None:
        """Takes what there is now; StaleCatalogueError where that fails."""
        async with self._lock:
            await self._refresh()

    async def change(
        self,
        op: Op,
        name: str = "",
        *,
        content: Content | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        """Has the hub make a change, and takes it; its version.

        A hub that is lost meanwhile is waited for, and asked again if it had not written the change
        by then. Raises what CatalogueHub.change() raises, HubLostError when it does not come back.
        """
        fields = None if content is None else asdict(content)
        deadline = self._clock() + _CHANGE_TRIES_S
        while True:
            try:
                version = await self._hub.change(
                    op.value, name, content=fields, generation=generation, mix=mix
                )
                break
            except HubLostError:
                if self._clock() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
                with suppress(StaleCatalogueError):
                    await self.refresh()
                    if self._is_made(op, name, content, mix):
                        return self.version
        await self.at_least(version)
        return version

    def _is_made(
        self, op: Op, name: str, content: Content | None, mix: Mapping[str, float] | None
    ) -> bool:
        """Whether the catalogue is as a change would have made it."""
        if op is Op.MIX:
            return self.catalogue.default_mix == mix
        entry = self.catalogue.entries.get(name)
        if op is Op.DROP:
            return entry is None
        if entry is None:
            return False
        if op in (Op.PIN, Op.UNPIN):
            return entry.content.pinned == (op is Op.PIN)
        return entry.content == content

    async def _refresh(self) -> None:
        try:
            await self._poll(0)
        except HubLostError as error:
            try:
                await self._read_file()
            except FormatError as damage:
                raise StaleCatalogueError(
                    f"the catalogue does not answer, and its file cannot be read: {damage}"
                ) from error

    async def _poll(self, wait_s: float) -> None:
        asked = self._clock()
        answer = await self._hub.poll(self._who, self.version, lease=self._lease, wait_s=wait_s)
        if "snapshot" in answer:
            self._replace(Catalogue.from_snapshot(answer["snapshot"]))
        else:
            self._apply([Change.from_json(one) for one in answer["changes"]])
        if self._lease:
            self._fresh_until = asked + LEASE_S - _MARGIN_S

    async def _read_file(self) -> None:
        """Where nobody can be asked. It gives no lease: the next one who asks reads again."""
        path = self._folder / FILE
        try:
            found = path.stat()
        except OSError as error:
            raise FormatError(str(error.strerror), path=path) from error
        tag = (found.st_ino, found.st_size, found.st_mtime_ns)
        if tag != self._file_tag:
            self._replace(await asyncio.to_thread(read_catalogue, self._folder))
            self._file_tag = tag

    def _apply(self, changes: list[Change]) -> None:
        new = [one for one in changes if one.version > self.version]
        if new:
            self.catalogue.apply(new)
            names = frozenset(one.name for one in new if one.op is not Op.MIX)
            self._on_change(self.catalogue, names)

    def _replace(self, new: Catalogue) -> None:
        if new.version <= self.version:
            return
        old, self.catalogue = self.catalogue, new
        names = {n for n, e in old.entries.items() if new.entries.get(n) != e}
        names |= new.entries.keys() - old.entries.keys()
        self._on_change(new, frozenset(names))
