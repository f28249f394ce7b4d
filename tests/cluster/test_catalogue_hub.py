"""The hub and its copies: who hears of a change before it counts, and what there is without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loragraph.cluster import catalogue_copy as module
from loragraph.cluster.catalogue import Catalogue, Op
from loragraph.cluster.catalogue_copy import CatalogueCopy, HubLostError
from loragraph.cluster.catalogue_file import FILE
from loragraph.cluster.catalogue_hub import LEASE_S, CatalogueHub
from loragraph.errors import (
    InvalidRequestError,
    LoragraphError,
    ModelNotFoundError,
    StaleCatalogueError,
)
from tests.cluster.test_catalogue import content_of


class Clock:
    """Seconds by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Link:
    """A hub that can be lost, and whose answers can be."""

    def __init__(self, hub: CatalogueHub) -> None:
        self.hub = hub
        self.down = False
        self.loses_answers = False
        self.n_polls = 0

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        self.n_polls += 1
        if self.down:
            raise HubLostError("down")
        return await self.hub.poll(who, since, lease=lease, wait_s=wait_s)

    async def change(
        self,
        op: str,
        name: str = "",
        *,
        content: Mapping[str, Any] | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        if self.down:
            raise HubLostError("down")
        version = await self.hub.change(op, name, content=content, generation=generation, mix=mix)
        if self.loses_answers:
            self.loses_answers = False
            raise HubLostError("the answer is lost")
        return version


class Cluster:
    """A hub and two copies, one with a lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.hub = CatalogueHub(folder, clock=self.clock)
        self.link = Link(self.hub)
        self.names: list[frozenset[str]] = []
        self.copy = CatalogueCopy(
            self.link,
            "replica",
            folder,
            on_change=lambda _, names: self.names.append(names),
            clock=self.clock,
        )
        self.front = CatalogueCopy(self.link, "front", folder, lease=True, clock=self.clock)

    def restart(self) -> None:
        """Another hub on the same file."""
        self.hub.close()
        self.hub = self.link.hub = CatalogueHub(self.folder, clock=self.clock)
        self.link.down = False


def run(folder: Path, test: Callable[[Cluster], Awaitable[None]]) -> None:
    """A test on a cluster of its own, on one event loop."""

    async def main() -> None:
        cluster = Cluster(folder)
        try:
            async with asyncio.timeout(20):
                await test(cluster)
        finally:
            cluster.hub.close()

    asyncio.run(main())


async def settle() -> None:
    """Lets all go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_change_is_known_to_who_made_it_and_to_who_asks(tmp_path: Path) -> None:
    """Whichever copy it is made through."""

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        assert c.copy.catalogue.entries["a"].generation == 1
        assert (await c.front.current()).version == 1
        following = asyncio.ensure_future(c.front.follow())
        await c.front.change(Op.MIX, mix={"a": 0.5})
        following.cancel()
        await c.copy.at_least(2)
        assert c.copy.catalogue.default_mix == {"a": 0.5}
        assert c.names == [frozenset({"a"}), frozenset()]

    run(tmp_path, test)


def test_what_is_wrong_with_a_change_is_told(tmp_path: Path) -> None:
    """As the catalogue says it, and nothing is changed."""

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        for wrong, work in (
            (InvalidRequestError, c.copy.change(Op.REGISTER, "a", content=content_of(2))),
            (ModelNotFoundError, c.copy.change(Op.DROP, "b")),
            (ModelNotFoundError, c.copy.change(Op.MIX, mix={"b": 1})),
            (LoragraphError, c.copy.change(Op.SWAP, "a", content=content_of(2), generation=9)),
        ):
            with pytest.raises(wrong):
                await work
        assert c.hub.catalogue.version == 1

    run(tmp_path, test)


def test_a_change_waits_for_leased_copies(tmp_path: Path) -> None:
    """A front that follows learns of it before it is told as done; only then does it count."""

    async def test(c: Cluster) -> None:
        await c.front.current()
        change = asyncio.ensure_future(c.copy.change(Op.REGISTER, "a", content=content_of(1)))
        await settle()
        assert not change.done()
        assert c.hub.catalogue.version == 1
        assert (await c.front.current()).version == 0  # by its lease, without asking
        following = asyncio.ensure_future(c.front.follow())
        await change
        assert (await c.front.current()).version == 1
        following.cancel()

    run(tmp_path, test)


def test_a_copy_that_is_silent_loses_its_lease_first(tmp_path: Path) -> None:
    """The change counts once the lease is over; by then the copy does not trust itself any more."""

    async def test(c: Cluster) -> None:
        await c.front.current()
        n_polls = c.link.n_polls
        await c.front.current()
        assert c.link.n_polls == n_polls
        change = asyncio.ensure_future(c.copy.change(Op.REGISTER, "a", content=content_of(1)))
        await settle()
        c.clock.now += LEASE_S
        c.hub.leave("nobody")  # wakes who waits
        await change
        assert (await c.front.current()).version == 1
        assert c.link.n_polls > n_polls

    run(tmp_path, test)


def test_a_front_that_leaves_holds_nobody_up(tmp_path: Path) -> None:
    """It gives its lease back."""

    async def test(c: Cluster) -> None:
        await c.front.current()
        change = asyncio.ensure_future(c.copy.change(Op.REGISTER, "a", content=content_of(1)))
        await settle()
        assert not change.done()
        c.hub.leave("front")
        await change

    run(tmp_path, test)


def test_a_new_hub_waits_for_leases_that_it_does_not_know(tmp_path: Path) -> None:
    """A front may still answer by a lease of the hub before."""

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        assert (await c.front.current()).version == 1
        c.restart()
        change = asyncio.ensure_future(c.copy.change(Op.DROP, "a"))
        await settle()
        assert not change.done()
        assert (await c.front.current()).version == 1
        c.clock.now += LEASE_S
        c.hub.leave("nobody")
        await change
        assert (await c.front.current()).version == 2

    run(tmp_path, test)


def test_without_a_hub_the_file_is_read(tmp_path: Path) -> None:
    """It has all that was ever told; a damaged one is not believed."""

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        c.link.down = True
        assert (await c.front.current()).version == 1
        await c.hub.change("swap", "a", content=asdict(content_of(2)))
        assert (await c.front.current()).entries["a"].generation == 2
        await c.copy.at_least(2)
        assert c.names[-1] == frozenset({"a"})
        with pytest.raises(StaleCatalogueError):
            await c.copy.at_least(3)
        (tmp_path / FILE).write_bytes(b"nonsense\n")
        with pytest.raises(StaleCatalogueError, match="cannot be read"):
            await c.front.current()

    run(tmp_path, test)


@pytest.mark.parametrize("op", list(Op))
def test_a_change_whose_answer_is_lost_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    """The hub wrote it and died: its successor has it, and it is not asked for again."""
    monkeypatch.setattr(module, "_RETRY_S", 0.0)

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        await c.copy.change(Op.REGISTER, "b", content=content_of(1, pinned=True))
        c.link.loses_answers = True
        name = {Op.REGISTER: "c", Op.MIX: "", Op.UNPIN: "b"}.get(op, "a")
        content = content_of(2) if op in (Op.REGISTER, Op.SWAP) else None
        await c.copy.change(op, name, content=content, mix={"a": 2.0} if op is Op.MIX else None)
        assert c.copy.version == 3
        assert c.hub.catalogue.version == 3

    run(tmp_path, test)


def test_a_change_waits_for_a_hub_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fails when it does not."""
    monkeypatch.setattr(module, "_RETRY_S", 0.0)

    async def test(c: Cluster) -> None:
        c.link.down = True
        change = asyncio.ensure_future(c.copy.change(Op.REGISTER, "a", content=content_of(1)))
        await settle()
        assert not change.done()
        c.restart()
        await change
        c.link.down = True
        change = asyncio.ensure_future(c.copy.change(Op.DROP, "a"))
        await settle()
        c.clock.now += 60
        with pytest.raises(HubLostError):
            await change

    run(tmp_path, test)


def test_a_copy_far_behind_takes_a_snapshot(tmp_path: Path) -> None:
    """And knows which names are others now."""

    async def test(c: Cluster) -> None:
        await c.copy.change(Op.REGISTER, "a", content=content_of(1))
        await c.copy.change(Op.REGISTER, "b", content=content_of(1))
        c.names.clear()
        await c.hub.change("swap", "a", content=asdict(content_of(2)))
        await c.hub.change("register", "c", content=asdict(content_of(3)))
        c.hub.catalogue._changes.clear()
        await c.copy.refresh()
        assert c.names == [frozenset({"a", "c"})]
        assert c.copy.catalogue.snapshot() == c.hub.catalogue.snapshot()

    run(tmp_path, test)


def test_ids_and_dropped_names_outlive_snapshots() -> None:
    """An id stays through a swap, and is not used twice; a dropped name is remembered."""
    one = Catalogue()
    one.apply([one.register("a", content_of(1))])
    one.apply([one.register("b", content_of(1))])
    one.apply([one.mix({"a": 1.0, "b": 2.0})])
    one.apply([one.swap("a", content_of(2))])
    one.apply([one.drop("b")])
    one.apply([one.register("c", content_of(1))])
    two = Catalogue.from_snapshot(one.snapshot())
    for catalogue in (one, two):
        assert {n: e.id for n, e in catalogue.entries.items()} == {"a": 0, "c": 2}
        assert [catalogue.name_of(i) for i in range(3)] == ["a", None, "c"]
        assert catalogue.default_mix == {"a": 1.0}
        assert set(catalogue.dropped) == {"b"}
        assert catalogue.next_id == 3
