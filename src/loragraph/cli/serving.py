"""From a plan to a server that listens, loads, serves, drains and ends."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loragraph.cli.library import ggml_folder
from loragraph.cli.serve_plan import Plan
from loragraph.cli.serve_report import show_report
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.errors import ConfigError, LoragraphError
from loragraph.server.access_file import access_lines
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.protocol import StreamProtocol
from loragraph.server.state import ServerState

_LAST_WORDS_S = 5
"""Seconds for answers to leave once their requests have ended."""


def run_server(plan: Plan, config: ServerConfig, console: Console) -> None:
    """Serves until a signal ends it. Raises what kept it from starting.

    It listens before it loads, so that /health can tell; what cannot be loaded ends it.
    """
    with access_lines(plan.access_log), bound_socket(plan.host, plan.port) as sock:
        app = create_app(None, config)
        server = _Server(plan, app)
        opening = _Opening(plan, app, server, console, _url(sock, plan) + config.api_prefix)
        server.on_late = opening.abort
        opening.start()
        try:
            server.run([sock])
        finally:
            opening.close()
    if opening.error is not None:
        raise opening.error


def _url(sock: socket.socket, plan: Plan) -> str:
    scheme = "http" if plan.tls is None else "https"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, with a first signal that lets running requests end and a second that does not."""

    def __init__(self, plan: Plan, app: FastAPI) -> None:
        super().__init__(_uvicorn_config(plan, app))
        self._state: ServerState = app.state.loragraph
        self._drain_timeout_s = plan.drain_timeout_s
        self._drains_until: float | None = None
        self.on_late: Callable[[], None] = lambda: None  # to end what still runs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: the first drains, the second ends, a third does not even wait."""
        if self._drains_until is None:
            self._drains_until = time.monotonic() + self._drain_timeout_s
            self._state.drain()
        elif not self.should_exit:
            self._drains_until = -1.0
        else:
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._drains_until is not None and not self.should_exit:
            late = time.monotonic() > self._drains_until
            self.should_exit = late or not self._state.runs
            if late:
                self.on_late()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals meanwhile; uvicorn would raise them once more at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in signals}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


class _Opening:
    """Loads model and adapters in a thread of its own, while the server already listens."""

    def __init__(
        self, plan: Plan, app: FastAPI, server: _Server, console: Console, url: str
    ) -> None:
        self.error: LoragraphError | None = None
        self._url = url
        self._plan = plan
        self._state: ServerState = app.state.loragraph
        self._server = server
        self._console = console
        self._model: Model | None = None
        self._engine: Engine | None = None
        self._aborting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._main, name="loragraph-opening", daemon=True)

    def start(self) -> None:
        """Begins to load."""
        self._thread.start()

    def abort(self) -> None:
        """Has the requests that still run end with an error; does not wait for that."""
        if self._engine is not None and self._aborting is None:
            close = partial(self._engine.close, drain=False)
            self._aborting = threading.Thread(target=close, name="loragraph-abort")
            self._aborting.start()

    def close(self) -> None:
        """Frees what was loaded; requests that still run end."""
        if self._server.force_exit and self._thread.is_alive():
            return  # a load cannot be stopped, and the process ends anyway
        self._thread.join()
        self.abort()
        if self._aborting is not None:
            self._aborting.join()
        if self._model is not None:
            self._model.close()

    def _main(self) -> None:
        try:
            self._load()
        except LoragraphError as error:
            self.error = error
        finally:
            if self._engine is None or self.error is not None:
                self._server.should_exit = True  # an unexpected error's traceback is shown

    def _load(self) -> None:
        plan = self._plan
        self._model = _load_model(self._console, plan)
        n_ctx, max_sequence_tokens = plan.limits(self._model.hparams.n_ctx_train)
        engine = Engine(
            self._model,
            n_ctx=n_ctx,
            max_sequence_tokens=max_sequence_tokens,
            adapter_dir=plan.adapter_dir,
            **plan.engine_options,
        )
        self._engine = engine
        for one in plan.adapters:
            # Those of the default mix as a whole, so that what is wrong is known at once.
            engine.load_adapter(one.name, one.path, preload=one.scale is not None)
        for name in plan.pinned:
            engine.pin(name)
        self._state.ids.sync(one.name for one in plan.adapters)  # as on the command line
        self._state.opened(engine)
        for one in plan.adapters:  # what is wrong with a sidecar is known at once too
            self._state.sidecars.of(engine.registry.resolve(one.name))
        show_report(self._console, self._state, plan.engine_options, self._url)


def _load_model(console: Console, plan: Plan) -> Model:
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("load", total=None)
        return Model.load(
            plan.base,
            n_threads=plan.threads,
            repack=plan.repack,
            ggml_folder=ggml_folder(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _uvicorn_config(plan: Plan, app: FastAPI) -> uvicorn.Config:
    key, cert = plan.tls or (None, None)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        loop="asyncio",  # whatever else is installed
        http=StreamProtocol,  # h11's: it bounds headers, httptools does not
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        timeout_keep_alive=65,
        ssl_keyfile=key,
        ssl_certfile=cert,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{cert}: {error}", field="--ssl-cert-file") from error
    return config


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError where that is not possible."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"expected a port from 0 to 65535, got {port}", field="--port")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host}: {error.strerror or error}", field="--host") from error
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(OSError, AttributeError):  # IPv4 clients too, where :: is given
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        used = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"{host}:{port}: {error.strerror or error}",
            field="--port" if used else "--host",
            hint="another program listens there; choose another port" if used else "",
        ) from error
    return sock
