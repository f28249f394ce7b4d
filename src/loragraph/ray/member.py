"""One replica without Ray: an engine, its copy of the catalogue, and the single server's routes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Scope

from loragraph.cluster.catalogue import Catalogue
from loragraph.cluster.catalogue_copy import CatalogueCopy, Hub
from loragraph.cluster.sources import Sources, adapter_check
from loragraph.cluster.transports import require_packages
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.pool import State as Residence
from loragraph.engine.table import AdapterRow
from loragraph.errors import (
    CapacityError,
    LifecycleError,
    ModelNotFoundError,
    StaleCatalogueError,
)
from loragraph.ray.admin import CatalogueAdmin
from loragraph.ray.forward import ACCEPTED, REFUSED
from loragraph.ray.hint import Hint
from loragraph.ray.options import AppArgs
from loragraph.ray.running import run_app
from loragraph.ray.store import CatalogueIds, CatalogueStore, SharedCatalogue
from loragraph.server.access_file import access_lines
from loragraph.server.app import create_app
from loragraph.server.metrics import ServerMetrics
from loragraph.server.state import Phase, ServerState

_TOGETHER_S = 0.05
"""For which the word that a request was accepted waits for the beginning of its answer."""


class Member:
    """A replica; open() it, and close() it. Belongs to one event loop."""

    def __init__(self, id_: str, args: AppArgs, hub: Hub) -> None:
        self.id = id_
        self._args = args
        self._copy = CatalogueCopy(hub, id_, args.catalogue_dir, on_change=self._on_change)
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._app: FastAPI | None = None

    async def open(self) -> None:
        """Loads the base, registers the adapters of the start, and is ready then.

        Raises what is wrong with the base, an adapter, or the catalogue; it is closed then.
        """
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        require_packages(self._args.lora_schemes)
        self._stack.enter_context(access_lines(self._args.access_log))
        loop = asyncio.get_running_loop()
        shared = SharedCatalogue(self._copy, loop)
        await self._copy.refresh()
        folder = Path(tempfile.mkdtemp(prefix="loragraph-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        model = await asyncio.to_thread(self._load)
        self._stack.callback(model.close)
        sources = Sources(self._args.source_options(), adapter_check(model.lib))
        store = CatalogueStore(shared, sources, self._args.lora_dir, folder / "remote")
        engine = await asyncio.to_thread(self._assemble, model, store)
        self._stack.callback(engine.close, drain=False)
        self._engine = engine
        admin = CatalogueAdmin(shared, store, self._args.lora_schemes)
        await asyncio.to_thread(self._seed, engine, admin)
        app = create_app(engine, self._args.server_config(), admin=admin, ids=CatalogueIds(shared))
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        self._app = app
        self._take_mix(self._copy.catalogue)
        following = asyncio.ensure_future(self._copy.follow())
        self._stack.push_async_callback(_cancelled, following)

    async def close(self) -> None:
        """Ends what runs; twice is fine."""
        await self._stack.aclose()

    async def serve(
        self, scope: Scope, body: bytes, hint: Hint
    ) -> AsyncGenerator[list[Message], None]:
        """One request, as batches of ASGI messages behind one of our own.

        Never by a catalogue that is older than the request: a copy that cannot be refreshed
        refuses it.
        """
        assert self._app is not None, "a replica is asked before it is open"
        try:
            if self.state.phase is not Phase.READY:
                raise StaleCatalogueError("this replica takes no new requests")
            await self._copy.at_least(hint.version)
        except StaleCatalogueError as error:
            yield [{"type": REFUSED, "replica": self.id, "reason": error.message}]
            return
        accepted: Message = {"type": ACCEPTED, "replica": self.id}
        answer = run_app(self._app, scope, body)
        first = asyncio.ensure_future(_next(answer))
        try:
            # Each batch is a message of Ray's, so a quick answer's first one has both.
            await asyncio.wait({first}, timeout=_TOGETHER_S)
            if first.done():
                yield [accepted, *first.result()]
            else:
                yield [accepted]
                yield await first
            async for batch in answer:
                yield batch
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await answer.aclose()

    @property
    def state(self) -> ServerState:
        """Of the routes."""
        assert self._app is not None
        state = self._app.state.loragraph
        assert isinstance(state, ServerState)
        return state

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self.state.drain()

    def check(self) -> None:
        """LifecycleError where it can serve nothing any more."""
        if self._engine is None or self._engine.closed:
            raise LifecycleError("the engine is closed")

    async def report(self) -> dict[str, Any]:
        """What the router needs to know; see Routing.update."""
        return await asyncio.to_thread(self._report)

    async def figures(self) -> dict[str, Any]:
        """What /metrics and /replicas of the whole are made of."""
        metrics: ServerMetrics = self.state.extra["metrics"]
        text = await asyncio.to_thread(metrics.render) if self._args.metrics else b""
        return {
            "id": self.id,
            "status": self.state.phase.value,
            "n_runs": len(self.state.runs),
            "metrics": text.decode(),
            **await self.report(),
        }

    def _report(self) -> dict[str, Any]:
        engine = self._engine
        assert engine is not None
        rows = engine.adapters
        self._keep_pins(engine, rows)
        stats = engine.stats()
        resident = [[row.name, row.generation] for row in rows if row.state is not Residence.ABSENT]
        return {
            "busy": stats.core.n_jobs,
            "capacity": engine.config.max_sequences,
            "resident": resident,
            "draining": self.state.phase is not Phase.READY,
            "version": self._copy.version,
        }

    def _load(self) -> Model:
        return Model.load(self._args.base, n_threads=self._args.n_threads, repack=self._args.repack)

    def _assemble(self, model: Model, store: CatalogueStore) -> Engine:
        trained = model.hparams.n_ctx_train
        limits = [trained, self._args.max_model_len or 0, self._args.ctx_size]
        return Engine(
            model,
            n_ctx=self._args.ctx_size or trained,
            max_sequence_tokens=min(limit for limit in limits if limit > 0),
            store=store,
            **self._args.engine_options(),
        )

    def _seed(self, engine: Engine, admin: CatalogueAdmin) -> None:
        for one in self._args.adapters:
            admin.seed(engine, one.name, one.source)
        for one in self._args.adapters:
            if one.name in self._copy.catalogue.entries:
                engine.resolve(one.name)
        admin.seed_mix(self._args.default_mix)
        for name in self._copy.catalogue.default_mix or {}:
            engine.preload(name)  # so that what is wrong with it is known at once
        for name in self._args.lora_pin:
            engine.pin(name)

    def _on_change(self, catalogue: Catalogue, names: frozenset[str]) -> None:
        """On the event loop; quick."""
        if self._engine is not None and not self._engine.closed:
            for name in names:
                entry = catalogue.entries.get(name)
                known = self._engine.registry.known(name)
                if known is not None and (entry is None or entry.generation != known.number):
                    self._engine.withdraw_adapter(name)
        if self._app is not None:
            self._take_mix(catalogue)

    def _take_mix(self, catalogue: Catalogue) -> None:
        self.state.set_default_mix(catalogue.default_mix or {})

    def _keep_pins(self, engine: Engine, rows: Iterable[AdapterRow]) -> None:
        """Pins what the catalogue pins where it is in memory, and lets go of the others."""
        entries = self._copy.catalogue.entries
        for row in rows:
            entry = entries.get(row.name)
            if entry is None or row.generation != entry.generation:
                continue
            pinned = entry.content.pinned or row.name in self._args.lora_pin
            with suppress(CapacityError, ModelNotFoundError):  # dropped meanwhile
                if pinned and not row.pinned and row.state is Residence.RESIDENT:
                    engine.pin(row.name)
                elif row.pinned and not pinned:
                    engine.unpin(row.name)


async def _next(answer: AsyncGenerator[list[Message], None]) -> list[Message]:
    """The next batch; [] after the last."""
    async for batch in answer:
        return batch
    return []


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
