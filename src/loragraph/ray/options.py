"""What `loragraph.ray:build_app` is told: by `loragraph serve --ray`, or by a YAML file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loragraph.cluster.sources import SourceOptions
from loragraph.engine.assembly import AttentionName, KvType, LoweringName
from loragraph.errors import ConfigError
from loragraph.server.config import MAX_BODY_BYTES, ServerConfig

_GIB = 2**30
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class AdapterArg(BaseModel):
    """An adapter that is there from the start, unless the catalogue gives its name a meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str  # an absolute path that all replicas see, or a URL
    scale: float | None = None  # in the default mix; None: not part of it


class AppArgs(BaseModel):
    """The flags of `loragraph serve`, without what Ray Serve itself decides (host, port, TLS)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: Path  # a GGUF file that every replica can read
    adapters: tuple[AdapterArg, ...] = ()
    lora_dir: Path | None = None
    lora_pin: tuple[str, ...] = ()
    lora_schemes: tuple[str, ...] = ()  # of URLs that POST /v1/load_lora_adapter takes
    storage: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)  # by scheme
    catalogue_dir: Path  # of all nodes; the catalogue is kept there
    cache_dir: Path  # of each node; fetched adapters by digest
    cache_bytes: Positive = 64 * _GIB
    max_adapter_file_bytes: Positive = 4 * _GIB

    lowering: LoweringName = "routed"
    attention: AttentionName = "cells"
    kv_type: KvType = "f16"
    repack: bool = True
    ctx_size: Annotated[int, Field(ge=0)] = 8192
    max_model_len: Positive | None = None
    parallel: Positive = 32
    batch_size: Positive = 512
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    max_loras: Positive = 64
    max_lora_bytes: Positive | None = None
    threads: Positive | None = None  # None: cpus_per_replica, at least one

    alias: tuple[str, ...] = ()
    api_prefix: str = ""  # below which all routes are: /llm
    api_keys: tuple[str, ...] = Field((), repr=False)
    admin_keys: tuple[str, ...] = Field((), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    deadline: Seconds | None = None
    max_body_bytes: Positive = MAX_BODY_BYTES
    threads_http: Positive = 16
    send_timeout: Seconds = 120.0
    sse_ping_interval: float = 30.0
    drain_timeout: Seconds = 30.0
    metrics: bool = False
    slots: bool = True
    slot_save_path: Path | None = None  # of each machine
    props: bool = False
    page: bool = True
    access_log: Path | None = None  # a file of each node

    replicas: Positive = 1
    autoscale: tuple[Annotated[int, Field(ge=0)], Positive] | None = None  # least and most
    autoscale_up_delay: Seconds = 30.0  # of a load before a replica more is started
    autoscale_down_delay: Seconds = 600.0  # of less load before one is stopped
    cpus_per_replica: Annotated[float, Field(ge=0)] = 1.0
    gpus_per_replica: Annotated[float, Field(ge=0)] = 0.0
    report_interval: Seconds = 0.5  # of a replica's load and adapters to the router
    accept_timeout: Seconds = 60.0  # for which a request waits for a replica that takes it

    @classmethod
    def checked(cls, args: AppArgs | dict[str, Any]) -> AppArgs:
        """ConfigError for a field that is unknown or wrong."""
        if isinstance(args, cls):
            return args
        try:
            found = cls.model_validate(args)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError(str(first["msg"]), field=place) from error
        if found.autoscale is not None and found.autoscale[0] > found.autoscale[1]:
            raise ConfigError(f"expected the least first, got {found.autoscale}", field="autoscale")
        return found

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names of the base in requests."""
        return self.alias or (self.base.stem,)

    @property
    def catalogue_name(self) -> str:
        """The name of the actor that keeps this folder's catalogue."""
        path = str(self.catalogue_dir.absolute()).encode()
        return f"loragraph-catalogue-{hashlib.sha256(path).hexdigest()[:12]}"

    @property
    def default_mix(self) -> dict[str, float]:
        """What requests get at first that name no adapters."""
        return {one.name: one.scale for one in self.adapters if one.scale is not None}

    @property
    def n_threads(self) -> int:
        """Threads that compute in a replica."""
        return self.threads or max(1, int(self.cpus_per_replica))

    def server_config(self) -> ServerConfig:
        """What the routes are told; ConfigError for what cannot be."""
        return ServerConfig(
            aliases=self.base_names,
            api_prefix=self.api_prefix,
            api_keys=self.api_keys,
            admin_keys=self.admin_keys,
            allowed_hosts=self.allowed_hosts,
            cors_origins=self.cors_origins,
            adapter_dir=self.lora_dir,
            deadline_s=self.deadline,
            max_body_bytes=self.max_body_bytes,
            n_http_threads=self.threads_http,
            send_timeout_s=self.send_timeout,
            sse_ping_interval_s=self.sse_ping_interval,
            with_metrics=self.metrics,
            slot_save_path=self.slot_save_path,
            with_slots=self.slots,
            with_props=self.props,
            with_page=self.page,
        )

    def engine_options(self) -> dict[str, Any]:
        """Arguments of Engine() that do not depend on the model."""
        return {
            "max_batch_tokens": self.batch_size,
            "max_sequences": self.parallel,
            "max_waiting": self.max_waiting,
            "max_adapters": self.max_loras,
            "max_adapter_bytes": self.max_lora_bytes,
            "lowering": self.lowering,
            "attention": self.attention,
            "kv_type": self.kv_type,
            "n_threads": self.n_threads,
        }

    def source_options(self) -> SourceOptions:
        """Of what the catalogue names, which was checked when it was registered."""
        return SourceOptions(
            cache_dir=self.cache_dir,
            root=Path("/"),
            max_file_bytes=self.max_adapter_file_bytes,
            max_cache_bytes=self.cache_bytes,
            storage=self.storage,
        )
