"""A front and its replicas in one process, without Ray; alone, or in place of a single server."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
from starlette.types import Message, Receive, Scope, Send

from loragraph.cluster.catalogue_copy import CatalogueCopy, HubLostError
from loragraph.cluster.catalogue_hub import CatalogueHub
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.ray.forward import ACCEPTED, Forwarder, ReplicaLostError
from loragraph.ray.front import Front
from loragraph.ray.hint import Hint
from loragraph.ray.member import Member
from loragraph.ray.options import AdapterArg, AppArgs
from loragraph.ray.routing import Routing
from loragraph.ray.running import run_app
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from tests.server.serving import ADAPTERS, Served, listening

_REPORT_S = 0.05
_ENGINE_FIELDS = {
    "n_ctx": "ctx_size",
    "max_sequences": "parallel",
    "max_sequence_tokens": "max_model_len",
    "max_waiting": "max_waiting",
    "max_adapters": "max_loras",
    "adapter_dir": "lora_dir",
}
_CONFIG_FIELDS = {
    "aliases": "alias",
    "default_mix": "",  # of the adapters
    "max_prompts": "",
    "adapter_dir": "lora_dir",
    "deadline_s": "deadline",
    "n_http_threads": "threads_http",
    "send_timeout_s": "send_timeout",
    "sse_ping_interval_s": "sse_ping_interval",
    "with_metrics": "metrics",
    "with_slots": "slots",
    "with_props": "props",
    "with_page": "page",
}
"""Names of AppArgs for the single server's; "" for what it has not."""


class Link:
    """A replica's way to the hub, which can be cut."""

    def __init__(self, hub: CatalogueHub) -> None:
        self._hub = hub
        self.cut = False

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        if self.cut:
            await asyncio.sleep(0)
            raise HubLostError("cut")
        return await self._hub.poll(who, since, lease=lease, wait_s=wait_s)

    async def change(
        self,
        op: str,
        name: str = "",
        *,
        content: Mapping[str, Any] | None = None,
        generation: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> int:
        if self.cut:
            raise HubLostError("cut")
        return await self._hub.change(op, name, content=content, generation=generation, mix=mix)


class Replies:
    """A replica's answer, as a handle would give it."""

    def __init__(
        self,
        answer: AsyncGenerator[list[Message], None],
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._answer = answer
        self._ended = ended

    def __aiter__(self) -> AsyncGenerator[list[Message], None]:
        return self._answer

    def cancel(self) -> None:
        """Called once for each answer, however it ended."""
        self._ended()


class Fleet:
    """Members by name, two if nobody says otherwise, and a front whose router knows them.

    Open as a context manager, on an event loop.
    """

    def __init__(self, args: AppArgs, ids: str = "ab") -> None:
        self.args = args
        self.hub = CatalogueHub(args.catalogue_dir)
        self.links = [Link(self.hub) for _ in ids]
        self.members = [Member(id_, args, link) for id_, link in zip(ids, self.links, strict=True)]
        self.routing = Routing()
        self.copy = CatalogueCopy(Link(self.hub), "front", args.catalogue_dir, lease=True)
        self.front = Front(
            args.server_config(),
            Forwarder(self._call, accept_s=20, send_s=args.send_timeout),
            self.copy,
            self._figures,
        )
        self.only: str | None = None  # the one replica that requests go to
        self.hints: list[Hint] = []

    async def __aenter__(self) -> Fleet:
        self._following = asyncio.ensure_future(self.copy.follow())
        try:
            for member in self.members:
                await member.open()
            await self.report()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        for member in self.members:
            await member.close()
        self.hub.close()

    def _call(self, scope: Scope, body: bytes, hint: Hint) -> Replies:
        self.hints.append(hint)
        order = [self.only] if self.only else self.routing.order(hint)
        if not order:
            raise ReplicaLostError("none")
        member = next(one for one in self.members if one.id == order[0])
        self.routing.sent(member.id, hint)
        return Replies(member.serve(scope, body, hint), lambda: self.routing.ended(member.id))

    async def _figures(self) -> Sequence[Mapping[str, Any]]:
        return [await one.figures() for one in self.members]

    async def report(self) -> None:
        """As Serve asks for it now and then."""
        self.routing.update({one.id: await one.report() for one in self.members})


@dataclass(frozen=True)
class ManyState:
    """What tests ask of a server's state, asked of the front and of all members."""

    url: str
    fleet: Fleet

    def set_default_mix(self, scales: Mapping[str, float]) -> None:
        """Of all replicas."""
        body = [{"name": name, "scale": scale} for name, scale in scales.items()]
        key = (*self.fleet.args.admin_keys, "")[0]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        httpx.post(
            f"{self.url}/lora-adapters", json=body, headers=headers, timeout=60
        ).raise_for_status()

    @property
    def runs(self) -> list[Any]:
        """Of all members."""
        return [run for member in self.fleet.members for run in member.state.runs]

    @property
    def sidecars(self) -> Any:
        """They read the same files."""
        return self.fleet.members[0].state.sidecars


class ManyEngines:
    """An engine beside the members, whose answers are theirs; what they did is told by them."""

    def __init__(self, engine: Engine, fleet: Fleet) -> None:
        self._engine = engine
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def registry(self) -> Any:
        """A member's, which knows what the catalogue has."""
        return self._fleet.members[0].state.engine.registry

    def stats(self) -> Any:
        """Sums of the members' numbers."""
        found = [member.state.engine.stats() for member in self._fleet.members]
        return _summed(found)


def _summed(found: Sequence[Any]) -> Any:
    """Of numbers, and of dataclasses of them."""
    first = found[0]
    if dataclasses.is_dataclass(first):
        parts = {f.name: _summed([getattr(one, f.name) for one in found]) for f in fields(first)}
        return SimpleNamespace(**parts)
    return sum(found) if isinstance(first, int | float) else first


class FleetApp:
    """Its front as an application that opens and closes it all with its own life."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As Front's, but for the lifespan."""
        if scope["type"] != "lifespan":
            await self._fleet.front(scope, receive, send)
            return
        await receive()
        async with self._fleet:
            reporting = asyncio.ensure_future(self._report())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            await self._fleet.report()


@contextmanager
def serving(
    folder: Path,
    config: ServerConfig | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    ids: str = "ab",
    **engine_options: Any,
) -> Iterator[Served]:
    """As tests.server.serving.serving(), but a front and its members."""
    if adapters is None:
        adapters = {name: folder / "adapters" / f"{name}.gguf" for name in ADAPTERS}
    config = config or ServerConfig()
    options: dict[str, Any] = {"n_ctx": 1024, "max_sequences": 8, **engine_options}
    with tempfile.TemporaryDirectory(prefix="lg-") as own:
        args = args_of(folder, config, adapters, options, Path(own))
        fleet = Fleet(args, ids)
        with (
            Model.load(folder / "base.gguf", n_threads=1) as model,
            Engine(model, adapters, n_threads=1, **options) as engine,
            listening(FleetApp(fleet)) as (url, _),
        ):
            yield Served(url, ManyState(url, fleet), ManyEngines(engine, fleet), folder)  # type: ignore[arg-type]


def loading(engine: None, config: ServerConfig) -> Front:
    """As create_app() without an engine: a front whose one member is still loading."""
    app = create_app(engine, config)

    async def whole() -> Sequence[Mapping[str, Any]]:
        return [{"id": "a", "status": "loading", "metrics": ""}]

    async def serve(scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        yield [{"type": ACCEPTED, "replica": "a"}]
        async for batch in run_app(app, scope, body):
            yield batch

    def call(scope: Scope, body: bytes, hint: Hint) -> Replies:
        return Replies(serve(scope, body))

    return Front(config, Forwarder(call), CatalogueCopy(NoHub(), "front", Path("/")), whole)


class NoHub:
    """Nothing is ever changed."""

    async def poll(self, who: str, since: int, *, lease: bool, wait_s: float) -> dict[str, Any]:
        """No news."""
        return {"changes": []}

    async def change(self, op: str, name: str = "", **what: Any) -> int:
        """Not here."""
        raise AssertionError("nothing is changed")


def args_of(
    folder: Path,
    config: ServerConfig,
    adapters: Mapping[str, str | Path],
    engine_options: Mapping[str, Any],
    own: Path,
) -> AppArgs:
    """What the front and its members are told, of what a single server is told."""
    given = {_ENGINE_FIELDS[name]: value for name, value in engine_options.items()}
    for field in fields(config):
        name = _CONFIG_FIELDS.get(field.name, field.name)
        if name:
            given[name] = getattr(config, field.name)
    given["adapters"] = tuple(
        AdapterArg(name=name, source=str(path), scale=config.default_mix.get(name))
        for name, path in adapters.items()
    )
    return AppArgs(
        base=folder / "base.gguf",
        catalogue_dir=own / "catalogue",
        cache_dir=own / "cache",
        threads=1,
        **given,
    )
