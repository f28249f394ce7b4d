"""`loragraph serve --ray`: the same flags, served by many replicas on Ray Serve."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

from loragraph.cli.serve_plan import Plan
from loragraph.cli.serving import bound_socket
from loragraph.cluster.transports import SCHEMES
from loragraph.errors import ConfigError
from loragraph.server.config import ServerConfig

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RayPlan:
    """How many replicas, where, and what they share."""

    replicas: int
    autoscale: tuple[int, int] | None
    address: str = ""  # of a cluster that runs; "": one is started here, on loopback
    catalogue: Path | None = None
    cache: Path | None = None
    schemes: Sequence[str] = ()

    @property
    def n_most(self) -> int:
        """Replicas at most."""
        return self.replicas if self.autoscale is None else self.autoscale[1]


def ray_plan(
    replicas: int,
    autoscale: str | None,
    address: str | None,
    catalogue: Path | None,
    cache: Path | None,
    schemes: Sequence[str],
) -> RayPlan:
    """The flags, checked; ConfigError for what cannot be."""
    if replicas < 1:
        raise ConfigError(f"expected at least one, got {replicas}", field="--replicas")
    unknown = sorted(set(schemes) - (SCHEMES - {"file"}))
    if unknown:
        known = ", ".join(sorted(SCHEMES - {"file"}))
        raise ConfigError(f"expected one of {known}, got {unknown[0]!r}", field="--lora-scheme")
    if address and (catalogue is None or cache is None):
        raise ConfigError(
            "expected --catalogue and --lora-cache beside it, got one cluster of many machines",
            field="--ray-address",
            hint="the catalogue lies in a folder that all machines see, the cache on each",
        )
    return RayPlan(
        replicas, _range(autoscale), address or "", catalogue, cache, tuple(dict.fromkeys(schemes))
    )


def _range(text: str | None) -> tuple[int, int] | None:
    """(1, 4) of "1:4"."""
    if text is None:
        return None
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise ConfigError(f"expected MIN:MAX as in 1:4, got {text!r}", field="--autoscale")
    return int(least), int(most)


def run_ray(plan: Plan, config: ServerConfig, ray: RayPlan, console: Console) -> None:
    """Serves until a signal ends it. Raises what kept it from starting."""
    try:
        from loragraph.ray import local  # and all of Ray
    except ImportError as error:
        raise ConfigError(
            f"expected Ray Serve, which is not installed ({error})",
            field="--ray",
            hint="in loragraph's checkout: scripts/setup, or pip install '.[ray]'",
        ) from error
    port = plan.port
    if not (ray.address and port):  # there Serve may listen at it already
        with bound_socket(plan.host, port) as sock:  # Serve says less of what is wrong with it
            port = int(sock.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="loragraph-") as own:
        args = app_args(plan, config, ray, Path(own))
        listen = local.Listen(plan.host, port, plan.tls)
        n_cpus = max(os.cpu_count() or 1, args.cpus_per_replica * ray.n_most)
        console.print(f"starting  {ray.n_most} replicas at most, {args.n_threads} threads each")
        with Stop() as stop, local.cluster(n_cpus, ray.address):
            stop.install()  # once more: Ray has handlers of its own
            with local.running(args, listen) as replicas:
                _tell(console, plan, config, ray, port)
                stop.wait()
                console.print("draining  running requests end; a second signal ends them")
                local.drain(replicas, plan.drain_timeout_s, stop.again)


def app_args(plan: Plan, config: ServerConfig, ray: RayPlan, own: Path) -> Any:
    """The application's arguments (AppArgs); `own`: a folder of this run."""
    from loragraph.ray.options import AdapterArg, AppArgs

    if plan.access_log is not None and str(plan.access_log) == "-":
        raise ConfigError("expected a file, as replicas have no terminal", field="--access-log")
    threads = plan.threads
    if threads is None:
        threads = 1 if ray.address else max(1, (os.cpu_count() or 1) // ray.n_most)
    options = dict(plan.engine_options)
    adapters = [
        AdapterArg(name=one.name, source=_source(one.path), scale=config.default_mix.get(one.name))
        for one in plan.adapters
    ]
    return AppArgs.checked(
        {
            "base": plan.base.absolute(),
            "adapters": adapters,
            "lora_dir": None if plan.adapter_dir is None else plan.adapter_dir.absolute(),
            "lora_pin": tuple(plan.pinned),
            "lora_schemes": tuple(ray.schemes),
            "catalogue_dir": (ray.catalogue or own / "catalogue").absolute(),
            "cache_dir": (ray.cache or own / "cache").absolute(),
            "lowering": options["lowering"],
            "attention": options["attention"],
            "kv_type": options["kv_type"],
            "repack": plan.repack,
            "ctx_size": plan.n_ctx,
            "max_model_len": plan.max_model_len,
            "parallel": options["max_sequences"],
            "batch_size": options["max_batch_tokens"],
            "max_waiting": options["max_waiting"],
            "max_loras": options["max_adapters"],
            "max_lora_bytes": options["max_adapter_bytes"],
            "threads": threads,
            "cpus_per_replica": float(threads),
            "alias": config.aliases,
            "api_prefix": config.api_prefix,
            "api_keys": config.api_keys,
            "admin_keys": config.admin_keys,
            "allowed_hosts": config.allowed_hosts,
            "cors_origins": config.cors_origins,
            "deadline": config.deadline_s,
            "max_body_bytes": config.max_body_bytes,
            "threads_http": config.n_http_threads,
            "send_timeout": config.send_timeout_s,
            "sse_ping_interval": config.sse_ping_interval_s,
            "drain_timeout": plan.drain_timeout_s,
            "metrics": config.with_metrics,
            "slots": config.with_slots,
            "slot_save_path": None
            if config.slot_save_path is None
            else config.slot_save_path.absolute(),
            "props": config.with_props,
            "page": config.with_page,
            "access_log": None if plan.access_log is None else plan.access_log.absolute(),
            "replicas": ray.replicas,
            "autoscale": ray.autoscale,
        }
    )


def _source(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def _tell(console: Console, plan: Plan, config: ServerConfig, ray: RayPlan, port: int) -> None:
    scheme = "http" if plan.tls is None else "https"
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    keys = "" if config.has_keys else ", open to all who reach it"
    n = f"{ray.replicas}" if ray.autoscale is None else "{} to {}".format(*ray.autoscale)
    base_name = config.aliases[0] if config.aliases else plan.base.stem
    console.print(f"base      {base_name}: {plan.base}", soft_wrap=True)
    console.print(f"replicas  {n}", soft_wrap=True)
    console.print(f"listening at {scheme}://{host}:{port}{keys}", soft_wrap=True)


class Stop:
    """The signals that end a server: the first drains, the second ends what runs.

    One that comes before wait() leaves the `with` block at once.
    """

    def __init__(self) -> None:
        self.again = threading.Event()
        self._first = threading.Event()
        self._waits = False
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Handles them until the block is left."""
        for sig in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(sig, self._handle)
            self._before.setdefault(sig, handler)

    def wait(self) -> None:
        """Until the first."""
        self._waits = True
        while not self._first.wait(_POLL_S):  # not for ever at once: signals come in between
            pass

    def __enter__(self) -> Stop:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)
        return isinstance(exc, _EndedError)

    def _handle(self, sig: int, frame: FrameType | None) -> None:
        if self._first.is_set():
            self.again.set()
            return
        self._first.set()
        if not self._waits:
            raise _EndedError


class _EndedError(BaseException):
    """A signal came while all was still starting."""
