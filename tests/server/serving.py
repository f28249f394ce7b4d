"""A server of tiny models on a socket of its own, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn

from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.protocol import StreamProtocol
from loragraph.server.state import ServerState
from tests.tiny import TinyAdapter, TinyLlama

ADAPTERS = ("alpha", "beta", "gamma")


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    state: ServerState
    engine: Engine
    folder: Path  # base.gguf, and adapters/NAME.gguf

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        """An HTTP client for it."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)


def write_files(folder: Path, model: TinyLlama | None = None) -> TinyLlama:
    """A base and three adapters of it."""
    model = model or TinyLlama()
    model.write(folder / "base.gguf")
    (folder / "adapters").mkdir(exist_ok=True)
    for seed, name in enumerate(ADAPTERS, 1):
        TinyAdapter(seed=seed, rank=2 + seed).write(folder / "adapters" / f"{name}.gguf", model)
    return model


@contextmanager
def serving(
    folder: Path,
    config: ServerConfig | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    **engine_options: Any,
) -> Iterator[Served]:
    """Serves the folder's base; `adapters` default to the three of write_files()."""
    if adapters is None:
        adapters = {name: folder / "adapters" / f"{name}.gguf" for name in ADAPTERS}
    options: dict[str, Any] = {"n_ctx": 1024, "max_sequences": 8, **engine_options}
    with (
        Model.load(folder / "base.gguf", n_threads=1) as model,
        Engine(model, adapters, n_threads=1, **options) as engine,
        listening(create_app(engine, config or ServerConfig())) as (url, app),
    ):
        yield Served(url, app.state.loragraph, engine, folder)


@contextmanager
def listening(app: Any) -> Iterator[tuple[str, Any]]:
    """Runs an application in a thread; its URL."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=5,
        loop="asyncio",
        http=StreamProtocol,
        ws="none",  # as `loragraph serve` has them
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([sock],), name="server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and thread.is_alive():
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        assert server.started, "the server ended at once"
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()
