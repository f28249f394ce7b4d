"""A cluster on this machine, on loopback alone, or one that runs already; and the front in it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from loragraph.errors import BackendError
from loragraph.ray.app import application
from loragraph.ray.deployments import NAMESPACE
from loragraph.ray.options import AppArgs

APP = "loragraph"
_OBJECT_STORE_BYTES = 80 << 20  # nothing is passed through it but large bodies
_POLL_S = 0.1
_ASK_S = 5.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves this machine
    # One event loop a process: the engine has a thread of its own, and each hop costs.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the front listens."""

    host: str
    port: int
    tls: tuple[Path, Path] | None = None  # key, certificate


@contextmanager
def cluster(n_cpus: float, address: str = "") -> Iterator[None]:
    """Connects to the cluster at an address, or starts one here that ends with the context.

    BackendError where that fails.
    """
    folder: str | None = None
    options: dict[str, Any] = {"address": address}
    if not address:
        folder = tempfile.mkdtemp(prefix="lg-")  # short: sockets lie in it
        options = {
            "address": "local",
            "num_cpus": n_cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": folder,
            "_node_ip_address": "127.0.0.1",
        }
    try:
        with _environment(_SETTINGS):
            ray.init(**options, configure_logging=False, log_to_driver=False)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise BackendError(f"Ray does not start: {error!s:.500}") from error
    try:
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(
    args: AppArgs, listen: Listen, *, name: str = APP, route_prefix: str = "/"
) -> Iterator[DeploymentHandle[Any]]:
    """Deploys the application in the connected cluster, and removes it again; its replicas' handle.

    Returns when it serves. What else Serve runs there goes on. BackendError where it does not come
    up, with Serve's reason, where one of that name runs there already, or where Serve listens
    elsewhere.
    """
    key, cert = listen.tls or (None, None)
    http = HTTPOptions(
        host=listen.host,
        port=listen.port,
        ssl_keyfile=None if key is None else str(key),
        ssl_certfile=None if cert is None else str(cert),
    )
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _check_free(name, http)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http, logging_config=quiet)
    try:
        app = application(args)
        serve.run(app, name=name, route_prefix=route_prefix, blocking=False, logging_config=quiet)
        yield serve.get_deployment_handle("Replica", name)
    except (RuntimeError, RayError, RayServeException) as error:
        raise BackendError(f"the replicas do not come up: {error!s:.2000}") from error
    finally:
        _remove(args, name)


def _check_free(name: str, http: HTTPOptions) -> None:
    """BackendError where Serve runs already and has the name, or other places to listen at."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    if name in serve.status().applications:
        raise BackendError(
            f"an application called {name} runs on this cluster already",
            hint=f"`serve status` shows it; `serve delete {name}` removes it",
        )
    there = client.http_config
    for field in ("host", "port", "ssl_keyfile", "ssl_certfile"):
        own, found = getattr(http, field), getattr(there, field)
        if own != found:
            raise BackendError(
                f"Serve runs on this cluster already: expected its {field} {own!r}, got {found!r}",
                hint="give --host, --port and TLS as Serve has them there, or shut it down",
            )


def _remove(args: AppArgs, name: str) -> None:
    """The application and its catalogue's actor; Serve as a whole where nothing else is in it."""
    try:
        with suppress(RayError, RayServeException, TimeoutError):  # Serve goes on with it by itself
            if set(serve.status().applications) - {name}:
                serve.delete(name)
            else:
                serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        with suppress(RayError, ValueError):  # who shares it starts another one
            ray.kill(ray.get_actor(args.catalogue_name, namespace=NAMESPACE))


def drain(replicas: DeploymentHandle[Any], timeout_s: float, enough: threading.Event) -> None:
    """No replica takes new requests; waits until none runs, for so long, or until it is enough."""
    deadline = time.monotonic() + timeout_s
    with suppress(RayError, RayServeException, TimeoutError):
        replicas.broadcast("drain").results(timeout_s=_ASK_S, return_exceptions=True)
        while time.monotonic() < deadline and not enough.is_set() and n_running(replicas):
            enough.wait(_POLL_S)


def n_running(replicas: DeploymentHandle[Any]) -> int:
    """Requests that run on the replicas that answer."""
    found = replicas.broadcast("figures").results(timeout_s=_ASK_S, return_exceptions=True)
    return sum(int(one["n_runs"]) for one in found if isinstance(one, dict))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started meanwhile inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
