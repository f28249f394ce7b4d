"""A front and two replicas in one process, without Ray: what they decide, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.adapters.convert import convert
from loragraph.cluster.catalogue_hub import CatalogueHub
from loragraph.errors import AdapterMismatchError, LifecycleError
from loragraph.ray.hint import Hint
from loragraph.ray.member import Member
from loragraph.ray.options import AdapterArg, AppArgs
from tests.adapters.convert.folders import lora, peft
from tests.cluster.http_files import file_server, whole
from tests.ray.cluster import app_args
from tests.ray.fleet import Fleet, Link
from tests.server.serving import write_files
from tests.server.test_peft import MODULES
from tests.tiny import TinyAdapter, TinyLlama

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


Test = Callable[[Fleet, httpx.AsyncClient], Awaitable[None]]


def run(args: AppArgs, test: Test) -> None:
    """A test with a fleet that is open, and a client of its front."""

    async def main() -> None:
        fleet = Fleet(args)
        transport = httpx.ASGITransport(app=fleet.front)
        async with (
            asyncio.timeout(100),
            fleet,
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
        ):
            await test(fleet, http)

    asyncio.run(main())


@pytest.fixture
def args(tmp_path: Path) -> AppArgs:
    """Of a base, its three adapters, and a folder of them."""
    write_files(tmp_path)
    return app_args(tmp_path)


async def text_of(http: httpx.AsyncClient, model: str, **fields: Any) -> Any:
    """A greedy answer, or its error's status."""
    body = {"prompt": "hello", "model": model, "max_tokens": 8, "temperature": 0, **fields}
    answer = await http.post("/v1/completions", json=body)
    return answer.json()["choices"][0]["text"] if answer.is_success else answer.status_code


def test_both_replicas_give_the_same(args: AppArgs) -> None:
    """Names, ids, generations and answers."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        seen = []
        for id_ in "ab":
            fleet.only = id_
            listed = (await http.get("/lora-adapters")).json()
            ids = [(one["id"], one["name"], one["generation"]) for one in listed]
            seen.append((ids, [await text_of(http, name) for name in ("base", "alpha", "beta")]))
        assert seen[0] == seen[1]
        assert seen[0][0] == [(0, "alpha", 1), (1, "beta", 2), (2, "gamma", 3)]
        assert len(set(seen[0][1])) == 3

    run(args, test)


def test_a_replica_that_missed_a_change_refreshes_before_it_serves(args: AppArgs) -> None:
    """It does not follow, yet never serves the old content under the new name."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        gamma = await text_of(http, "gamma")
        fleet.only = "b"
        await text_of(http, "alpha")
        fleet.members[1]._copy._hub = Paused(fleet.links[1])
        await asyncio.sleep(0)
        fleet.only = "a"
        body = {"lora_name": "alpha", "lora_path": "gamma.gguf", "load_inplace": True}
        assert (await http.post(LOAD, json=body)).status_code == 200
        fleet.only = "b"
        assert await text_of(http, "alpha") == gamma
        assert fleet.members[1]._copy.version == fleet.hub.catalogue.version

    run(args, test)


class Paused:
    """A hub that answers questions but has no news for who waits."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        if wait_s:
            await asyncio.Event().wait()
        return await self._link.poll(who, since, lease=lease, wait_s=0)

    change = Link.change


def test_a_replica_that_cannot_refresh_refuses(args: AppArgs) -> None:
    """Without hub and file it says so, and another one serves the request."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        beta = await text_of(http, "beta")
        fleet.links[1].cut = True
        lost = fleet.members[1]
        lost._copy._folder = args.catalogue_dir / "gone"
        fleet.only = "a"
        for name in ("last", "x"):  # of the first its question that waits still tells it
            body = {"lora_name": name, "lora_path": "beta.gguf"}
            assert (await http.post(LOAD, json=body)).status_code == 200
            while "last" not in lost._copy.catalogue.entries:
                await asyncio.sleep(0.01)
        messages = [
            batch async for batch in lost.serve({"type": "http"}, b"", Hint("r", version=99))
        ]
        assert [message["type"] for message in messages[0]] == ["loragraph.refused"]
        fleet.only = "b"
        assert await text_of(http, "x") == 503
        fleet.only = None
        for _ in range(4):
            assert await text_of(http, "x") == beta

    run(args, test)


def test_a_draining_replica_takes_nothing(args: AppArgs) -> None:
    """The router passes it over; what reaches it all the same goes on to another."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        fleet.members[0].drain()
        n_hints = len(fleet.hints)
        for number in range(6):
            assert isinstance(await text_of(http, "base", prompt=f"{number}"), str)
        assert len(fleet.hints) > n_hints + 6  # some were refused first
        await fleet.report()
        n_hints = len(fleet.hints)
        for number in range(6):
            assert isinstance(await text_of(http, "base", prompt=f"{number}"), str)
        assert len(fleet.hints) == n_hints + 6
        assert (await http.get("/health")).status_code == 200
        fleet.members[1].drain()
        assert (await http.get("/health")).status_code == 503
        statuses = {
            one["id"]: one["status"] for one in (await http.get("/replicas")).json()["replicas"]
        }
        assert statuses == {"a": "draining", "b": "draining"}

    run(args, test)


def test_keys_and_limits_hold_at_the_front(tmp_path: Path) -> None:
    """Of the single server: keys, bodies, headers; nothing refused reaches a replica's engine."""
    write_files(tmp_path)
    keyed = app_args(tmp_path, api_keys=("user",), admin_keys=("admin",), max_body_bytes=4096)

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user", "admin"))
        body = {"prompt": "a", "max_tokens": 1}
        load = {"lora_name": "x", "lora_path": "alpha.gguf"}
        big = {"prompt": "a" * 5000}

        async def chunks() -> AsyncGenerator[bytes, None]:
            yield json.dumps(big).encode()

        asked = [
            (401, await http.post("/v1/completions", json=body)),
            (200, await http.post("/v1/completions", json=body, headers=user)),
            (403, await http.post(LOAD, json=load, headers=user)),
            (200, await http.post(LOAD, json=load, headers=admin)),
            (413, await http.post("/v1/completions", json=big, headers=user)),
            (413, await http.post("/v1/completions", content=chunks(), headers=user)),
            (431, await http.get("/v1/models", headers={**user, "x-more": "x" * 70_000})),
            (401, await http.get("/metrics")),
            (401, await http.get("/replicas")),
            (200, await http.get("/metrics", headers=user)),
            (200, await http.get("/health")),
            (400, await http.post("/v1/completions", content=b"{", headers=user)),
            (404, await http.get("/nothing", headers=user)),
        ]
        assert [answer.status_code for _, answer in asked] == [status for status, _ in asked]
        assert all("error" in one.json() for status, one in asked if status >= 400)

    run(keyed, test)


def test_all_routes_below_a_prefix(tmp_path: Path) -> None:
    """Those about the whole too; what is outside of it is a 404 for both."""
    write_files(tmp_path)

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        body = {"prompt": "hello", "max_tokens": 2}
        asked = [
            (200, await http.post("/llm/v1/completions", json=body)),
            (200, await http.get("/llm/health")),
            (200, await http.get("/llm/metrics")),
            (200, await http.get("/llm/replicas")),
            (404, await http.post("/v1/completions", json=body)),
            (404, await http.get("/health")),
            (404, await http.get("/llm/nothing")),
        ]
        assert [answer.status_code for _, answer in asked] == [status for status, _ in asked]
        assert (await http.get("/llm/slots")).status_code == 200
        assert fleet.hints[-1].sticky == "figures"

    run(app_args(tmp_path, api_prefix="/llm"), test)


def test_the_routers_knowledge_of_residents(args: AppArgs) -> None:
    """Reports name what is in memory with its generation, and the load."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        fleet.only = "b"
        await text_of(http, "beta")
        a, b = [await member.report() for member in fleet.members]
        assert (a["resident"], b["resident"]) == ([], [["beta", 2]])
        assert (b["busy"], b["capacity"], b["draining"]) == (0, 8, False)
        assert fleet.hints[-1].adapters[0] == ("beta", 2)
        fleet.only = None
        await fleet.report()
        await text_of(http, "beta", prompt="another")
        assert (await fleet.members[0].report())["resident"] == []

    run(args, test)


def test_pins_follow_the_catalogue(args: AppArgs) -> None:
    """Where it is in memory a pinned adapter is kept; unpinned it may go, on every replica."""

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        def pinned(member: Member) -> set[str]:
            assert member._engine is not None
            return {row.name for row in member._engine.adapters if row.pinned}

        fleet.only = "b"
        await text_of(http, "alpha")
        fleet.only = "a"
        await http.post("/v1/pin_lora_adapter", json={"lora_name": "alpha"})
        await fleet.members[1]._copy.at_least(fleet.hub.catalogue.version)
        await fleet.report()
        assert [pinned(member) for member in fleet.members] == [{"alpha"}, {"alpha"}]
        fleet.only = "b"
        await http.post("/v1/unpin_lora_adapter", json={"lora_name": "alpha"})
        await fleet.members[0]._copy.at_least(fleet.hub.catalogue.version)
        await fleet.report()
        assert [pinned(member) for member in fleet.members] == [set(), set()]

    run(args, test)


def test_a_load_without_room_changes_nothing(tmp_path: Path) -> None:
    """The name means what it meant, everywhere."""
    write_files(tmp_path)

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        alpha = await text_of(http, "alpha")
        fleet.only = "a"
        assert (
            await http.post("/v1/pin_lora_adapter", json={"lora_name": "gamma"})
        ).status_code == 200
        new = await http.post(LOAD, json={"lora_name": "x", "lora_path": "beta.gguf"})
        body = {"lora_name": "alpha", "lora_path": "beta.gguf", "load_inplace": True}
        swap = await http.post(LOAD, json=body)
        assert (new.status_code, swap.status_code) == (503, 503)
        fleet.only = "b"
        assert await text_of(http, "x") == 404
        assert await text_of(http, "alpha") == alpha

    run(app_args(tmp_path, max_loras=1), test)


def test_what_is_cached_is_served_whatever_becomes_of_its_source(tmp_path: Path) -> None:
    """And a file for another base, or a path that leads out, is refused before it counts."""
    write_files(tmp_path)
    TinyAdapter().write(tmp_path / "adapters" / "wrong.gguf", TinyLlama(n_embd=32))

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        url = (tmp_path / "adapters" / "alpha.gguf").as_uri()
        for status, path in ((403, url), (400, "wrong.gguf"), (400, "../base.gguf")):
            answer = await http.post(LOAD, json={"lora_name": "w", "lora_path": path})
            assert answer.status_code == status
        assert fleet.hub.catalogue.entries.keys() == {"alpha", "beta", "gamma"}
        alpha = await text_of(http, "alpha")
        (tmp_path / "adapters" / "alpha.gguf").unlink()
        for id_ in "ab":
            fleet.only = id_
            assert await text_of(http, "alpha") == alpha

    run(app_args(tmp_path), test)


def test_an_overwritten_file_is_refused_until_it_is_swapped(tmp_path: Path) -> None:
    """Its digest is not the catalogue's; a replica that has the old content goes on with it."""
    model = write_files(tmp_path)

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        path = tmp_path / "adapters" / "alpha.gguf"
        alpha = await text_of(http, "alpha")
        for blob in (fleet.args.cache_dir / "blobs").iterdir():
            blob.unlink()
        TinyAdapter(seed=77).write(path, model)
        fleet.members[0]._engine.withdraw_adapter("alpha")  # type: ignore[union-attr]
        fleet.only = "a"
        assert await text_of(http, "alpha") == 409
        body = {"lora_name": "alpha", "lora_path": "alpha.gguf", "load_inplace": True}
        assert (await http.post(LOAD, json=body)).status_code == 200
        new = await text_of(http, "alpha")
        fleet.only = "b"
        assert await text_of(http, "alpha") == new != alpha

    run(app_args(tmp_path), test)


def test_a_peft_folder_from_a_url(tmp_path: Path) -> None:
    """Fetched and converted by each replica; the answers are those of the converted file."""
    write_files(tmp_path)
    folder = tmp_path / "mine"
    peft(folder, lora(MODULES))
    convert(folder, tmp_path / "base.gguf", tmp_path / "adapters" / "direct.gguf")
    with file_server() as files:
        for one in folder.iterdir():
            url = files.add(f"/mine/{one.name}", one.read_bytes(), whole)

        async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
            source = url.rpartition("/")[0] + "/"
            answer = await http.post(LOAD, json={"lora_name": "x", "lora_path": source})
            assert answer.status_code == 200, answer.text
            direct = await text_of(http, "direct")
            for id_ in "ab":
                fleet.only = id_
                assert await text_of(http, "x") == direct
                row = (await http.get("/v1/models/x")).json()
                assert row["root"] == "mine"
            assert direct != await text_of(http, "base")

        run(app_args(tmp_path, lora_schemes=("http",)), test)


def test_what_is_wrong_with_the_start_is_told(tmp_path: Path) -> None:
    """An adapter for another base keeps a replica from opening; nothing of it stays."""
    write_files(tmp_path)
    wrong = tmp_path / "wrong.gguf"
    TinyAdapter().write(wrong, TinyLlama(n_embd=32))
    args = app_args(tmp_path, adapters=(AdapterArg(name="w", source=str(wrong), scale=1.0),))

    async def main() -> None:
        hub = CatalogueHub(args.catalogue_dir)
        member = Member("a", args, Link(hub))
        try:
            with pytest.raises(AdapterMismatchError):
                await member.open()
            assert hub.catalogue.entries == {}
            await member.close()
            with pytest.raises(LifecycleError):
                member.check()
        finally:
            hub.close()

    asyncio.run(main())


def test_a_catalogue_outlives_its_replicas(args: AppArgs) -> None:
    """What was swapped and dropped stays so when all start again with the same flags."""

    async def change(fleet: Fleet, http: httpx.AsyncClient) -> None:
        body = {"lora_name": "alpha", "lora_path": "gamma.gguf", "load_inplace": True}
        assert (await http.post(LOAD, json=body)).status_code == 200
        assert (await http.post(UNLOAD, json={"lora_name": "beta"})).status_code == 200

    async def look(fleet: Fleet, http: httpx.AsyncClient) -> None:
        assert await text_of(http, "alpha") == await text_of(http, "gamma")
        assert await text_of(http, "beta") == 404
        assert fleet.hub.catalogue.entries["alpha"].generation == 5  # after three and the mix

    run(args, change)
    run(args, look)
