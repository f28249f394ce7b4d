"""The one place where the catalogue changes, and where its copies hear of it. For one event loop.

A copy with a lease may answer for the catalogue without asking, for `lease_s` after its last
question. So a change is told as done only when every such copy knows it, or its lease is over:
whoever asks any of them from then on sees it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loragraph.cluster.catalogue import Catalogue, Change, Op
from loragraph.cluster.catalogue_file import CatalogueFile
from loragraph.cluster.content import Content

LEASE_S = 4.0


@dataclass(slots=True)
class _Lease:
    version: int  # that the copy has
    until: float


class CatalogueHub:
    """The writer of a folder's catalogue; close() it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises what CatalogueFile() raises."""
        self._file = CatalogueFile(folder)
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        # Leases that the writer before this one gave are not known here.
        self._unknown_until = clock() + lease_s if self.catalogue.version else 0.0
        self._news = asyncio.Event()

    @property
    def catalogue(self) -> Catalogue:
        """What there is."""
        return self._file.catalogue

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        """What a copy at version `since` lacks, once there is something, or after `wait_s`.

        {"changes": [...]}, or {"snapshot": {...}} for one that is too far behind.
        """
        if lease:
            self._note(who, _Lease(since, self._clock() + self._lease_s))
        if since == self.catalogue.version and wait_s > 0:
            await self._wait(wait_s)
        changes = self.catalogue.changes_since(since)
        if changes is None:
            return {"snapshot": self.catalogue.snapshot()}
        return {"changes": [change.to_json() for change in changes]}

    async def change(
        self,
        op: str,
        name: str = "",
        *,
        content: Mapping[str, Any] | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        """Makes a change, on disk and known by all leased copies; the version that it gives.

        Raises what the methods of Catalogue and CatalogueFile.commit() raise.
        """
        change = self._change(Op(op), name, content, generation, mix)
        self._file.commit(change)
        self._tell()
        await self._known(change.version)
        return change.version

    def leave(self, who: str) -> None:
        """A copy gives its lease back."""
        self._leases.pop(who, None)
        self._tell()

    def close(self) -> None:
        """Lets another process write."""
        self._file.close()

    def _change(
        self,
        op: Op,
        name: str,
        content: Mapping[str, Any] | None,
        generation: int | None,
        mix: Mapping[str, float] | None,
    ) -> Change:
        catalogue = self.catalogue
        if op is Op.MIX:
            return catalogue.mix(mix or {})
        if op in (Op.REGISTER, Op.SWAP):
            assert content is not None, "a name is registered with its content"
            new = Content(**content)
            if op is Op.REGISTER:
                return catalogue.register(name, new)
            return catalogue.swap(name, new, generation=generation)
        make = {Op.PIN: catalogue.pin, Op.UNPIN: catalogue.unpin, Op.DROP: catalogue.drop}[op]
        return make(name, generation=generation)

    def _note(self, who: str, lease: _Lease) -> None:
        self._leases[who] = lease
        if lease.version == self.catalogue.version:
            self._tell()  # somebody may wait for just this

    async def _known(self, version: int) -> None:
        while (left := self._unaware_s(version)) > 0:
            await self._wait(left)

    def _unaware_s(self, version: int) -> float:
        """Seconds for which some copy may answer from before a version; 0: none does."""
        now = self._clock()
        for who in [who for who, lease in self._leases.items() if lease.until <= now]:
            del self._leases[who]
        behind = [lease.until for lease in self._leases.values() if lease.version < version]
        return max([self._unknown_until, *behind]) - now

    async def _wait(self, seconds: float) -> None:
        """Until something was told, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
