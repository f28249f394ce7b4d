"""What the routes of one server share: the engine, names, the default mix, and how it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, Request

from loragraph.engine.engine import Engine
from loragraph.server.config import ServerConfig
from loragraph.server.errors import ApiError
from loragraph.server.ids import AdapterIds
from loragraph.server.sidecar import Sidecars

if TYPE_CHECKING:
    from loragraph.server.adapters_api import LoadBody
    from loragraph.server.runs import Run


class Phase(StrEnum):
    """Where a server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class RunHooks(Protocol):
    """Who wants to know of generations: metrics, logs. Called on the event loop; quick."""

    def on_start(self, run: Run) -> None:
        """A request was given to the engine."""

    def on_end(self, run: Run) -> None:
        """It ended: by its result, an error or its client's leaving."""


class AdapterAdmin(Protocol):
    """How the routes change adapters. Every method blocks, and raises what is wrong."""

    def load(self, state: ServerState, body: LoadBody) -> None:
        """Gives a name its content; it is in memory then."""

    def unload(self, state: ServerState, name: str) -> None:
        """The name means nothing any more."""

    def pin(self, state: ServerState, name: str) -> None:
        """The adapter stays in memory."""

    def unpin(self, state: ServerState, name: str) -> None:
        """The opposite."""

    def set_default_mix(self, state: ServerState, scales: Mapping[str, float]) -> None:
        """What requests get that name no adapters."""


class Ids(Protocol):
    """Numbers for adapters; see AdapterIds."""

    def sync(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers for all names of now."""

    def forget(self, name: str) -> None:
        """The name is gone."""

    def name_of(self, number: int) -> str:
        """The name of a number; InvalidRequestError for one that nobody has."""


class ServerState:
    """One server. Read by any thread; changed through its methods."""

    def __init__(self, config: ServerConfig, admin: AdapterAdmin, ids: Ids | None = None) -> None:
        self.config = config
        self.admin = admin
        self.ids: Ids = AdapterIds() if ids is None else ids
        self.sidecars = Sidecars(lambda source: self.engine.model.compile_template(source))
        self.created = int(time.time())
        self.hooks: list[RunHooks] = []
        self.runs: dict[Run, None] = {}  # those of now, oldest first; the event loop's
        self.extra: dict[str, Any] = {}  # what single routes keep
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._phase = Phase.LOADING
        self._default_mix: Mapping[str, float] = dict(config.default_mix)

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._phase

    @property
    def engine(self) -> Engine:
        """The engine; 503 while it is loading."""
        if self._engine is None:
            raise ApiError(503, "Loading model")
        return self._engine

    @property
    def accepting_engine(self) -> Engine:
        """The engine for a new generation; 503 while it is loading or draining."""
        if self._phase is Phase.DRAINING:
            raise ApiError(503, "the server is shutting down")
        return self.engine

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names of the base; the first is the one shown."""
        return self.config.aliases or (self.engine.model.path.stem,)

    @property
    def base_name(self) -> str:
        """The name shown."""
        return self.base_names[0]

    @property
    def default_mix(self) -> Mapping[str, float]:
        """Adapters of requests that name none; a snapshot that never changes."""
        return self._default_mix

    def set_default_mix(self, scales: Mapping[str, float]) -> None:
        """For requests that start later."""
        with self._lock:
            self._default_mix = dict(scales)

    def forget_adapter(self, name: str) -> None:
        """After an unload: it leaves the default mix, and its id is spent."""
        with self._lock:
            self._default_mix = {n: s for n, s in self._default_mix.items() if n != name}
        self.ids.forget(name)

    def sync_ids(self) -> dict[str, int]:
        """Ids of all adapters of now, by name in their order; lists the folder of adapters."""
        return self.ids.sync(self.engine.registry.names())

    def opened(self, engine: Engine) -> None:
        """The engine is ready."""
        with self._lock:
            self._engine = engine
            if self._phase is Phase.LOADING:  # it may be told to end while it loads
                self._phase = Phase.READY
        self.sync_ids()

    def drain(self) -> None:
        """No new generations from now on."""
        self._phase = Phase.DRAINING


async def server_state(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state = request.app.state.loragraph
    assert isinstance(state, ServerState)
    return state


State = Annotated[ServerState, Depends(server_state)]
"""A route's parameter for the state."""
