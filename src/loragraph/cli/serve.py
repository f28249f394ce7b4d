"""`loragraph serve`: a base and its adapters over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loragraph.cli import serve_options as options
from loragraph.cli.adapter_list import csv_fields
from loragraph.cli.options import AttentionKind, KvType, Lowering
from loragraph.cli.serve_plan import Plan, ServedAdapter, served_adapters
from loragraph.errors import ConfigError
from loragraph.server.config import MAX_BODY_BYTES, ServerConfig

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_KEY_FILE = 1 << 20


def serve(
    base: options.Base,
    lora: options.Lora = None,
    lora_scaled: options.LoraScaled = None,
    lora_init_without_apply: options.InitWithoutApply = False,
    lora_dir: options.LoraDir = None,
    lora_pin: options.LoraPin = None,
    lowering: options.LoweringOption = Lowering.ROUTED,
    ctx_size: options.CtxSize = 8192,
    parallel: options.Parallel = 32,
    max_model_len: options.MaxModelLen = None,
    batch_size: options.BatchSize = 512,
    max_waiting: options.MaxWaiting = 1024,
    max_loras: options.MaxLoras = 64,
    max_lora_bytes: options.MaxLoraBytes = None,
    deadline: options.Deadline = None,
    alias: options.Alias = None,
    threads: options.Threads = None,
    kv_type: options.Kv = KvType.F16,
    attention: options.Attention = AttentionKind.CELLS,
    repack: options.Repack = True,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8080,
    api_prefix: options.ApiPrefix = "",
    ssl_key_file: options.SslKey = None,
    ssl_cert_file: options.SslCert = None,
    threads_http: options.ThreadsHttp = 16,
    max_body_bytes: options.MaxBodyBytes = MAX_BODY_BYTES,
    send_timeout: options.SendTimeout = 120.0,
    sse_ping_interval: options.SsePing = 30.0,
    drain_timeout: options.DrainTimeout = 30.0,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    admin_key: options.AdminKey = None,
    admin_key_file: options.AdminKeyFile = None,
    allowed_hosts: options.AllowedHosts = None,
    cors_origin: options.CorsOrigin = None,
    metrics: options.Metrics = False,
    slots: options.Slots = True,
    slot_save_path: options.SlotSavePath = None,
    props: options.Props = False,
    page: options.Page = True,
    access_log: options.AccessLog = None,
    ray: options.Ray = False,
    replicas: options.Replicas = 1,
    autoscale: options.Autoscale = None,
    ray_address: options.RayAddress = None,
    catalogue: options.CatalogueDir = None,
    lora_cache: options.LoraCache = None,
    lora_scheme: options.LoraScheme = None,
) -> None:
    """Serve BASE and adapters over HTTP: OpenAI's routes, llama-server's and vLLM's."""
    adapters = served_adapters(
        _values(lora, "--lora"), _values(lora_scaled, "--lora-scaled"), lora_dir
    )
    api_keys = _keys(api_key, "--api-key", api_key_file)
    admin_keys = _keys(admin_key, "--admin-key", admin_key_file)
    hosts = tuple(name.lower() for name in _values(allowed_hosts, "--allowed-hosts"))
    if not hosts and not (api_keys or admin_keys) and host in _LOOPBACK:
        hosts = _LOOPBACK
    config = ServerConfig(
        api_prefix=api_prefix,
        aliases=tuple(_values(alias, "--alias")),
        api_keys=api_keys,
        admin_keys=admin_keys,
        allowed_hosts=hosts,
        cors_origins=tuple(_values(cors_origin, "--cors-origin")),
        default_mix={} if lora_init_without_apply else _default_mix(adapters),
        adapter_dir=lora_dir,
        deadline_s=deadline,
        max_body_bytes=max_body_bytes,
        n_http_threads=threads_http,
        send_timeout_s=send_timeout,
        slot_save_path=_folder(slot_save_path, "--slot-save-path"),
        sse_ping_interval_s=sse_ping_interval,
        with_metrics=metrics,
        with_slots=slots,
        with_props=props,
        with_page=page,
    )
    plan = Plan(
        base=base,
        adapters=adapters,
        pinned=tuple(_values(lora_pin, "--lora-pin")),
        adapter_dir=lora_dir,
        n_ctx=ctx_size,
        max_model_len=max_model_len,
        threads=threads,
        repack=repack,
        engine_options={
            "max_batch_tokens": batch_size,
            "max_sequences": parallel,
            "max_waiting": max_waiting,
            "max_adapters": max_loras,
            "max_adapter_bytes": max_lora_bytes,
            "lowering": lowering.value,
            "attention": attention.value,
            "kv_type": kv_type.value,
        },
        host=host,
        port=port,
        tls=_tls(ssl_key_file, ssl_cert_file),
        drain_timeout_s=drain_timeout,
        access_log=access_log,
    )
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    # What these import would slow all other commands.
    if ray:
        from loragraph.cli.serve_ray import ray_plan, run_ray

        schemes = _values(lora_scheme, "--lora-scheme")
        many = ray_plan(replicas, autoscale, ray_address, catalogue, lora_cache, schemes)
        run_ray(plan, config, many, console)
    else:
        from loragraph.cli.serving import run_server

        run_server(plan, config, console)


def _default_mix(adapters: Sequence[ServedAdapter]) -> dict[str, float]:
    return {one.name: one.scale for one in adapters if one.scale is not None}


def _values(given: Sequence[str] | None, flag: str) -> list[str]:
    """The values of a repeatable option, or those of its environment variable."""
    if given is None:
        text = os.environ.get(options.variable(flag), "")
        given = [text] if text else []
    return [field for value in given for field in csv_fields(value, flag)]


def _keys(given: Sequence[str] | None, flag: str, file: Path | None) -> tuple[str, ...]:
    keys = _values(given, flag)
    if file is not None:
        try:
            with file.open("rb") as opened:
                lines = opened.read(_MAX_KEY_FILE).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}", field=f"{flag}-file") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:  # else a server meant to be closed would be open
            raise ConfigError(f"{file}: expected keys, got none", field=f"{flag}-file")
        keys += found
    return tuple(keys)


def _folder(path: Path | None, flag: str) -> Path | None:
    if path is not None and not path.is_dir():
        raise ConfigError(f"expected a folder, got {path}", field=flag)
    return path


def _tls(key: Path | None, cert: Path | None) -> tuple[Path, Path] | None:
    if (key is None) != (cert is None):
        raise ConfigError(
            "expected --ssl-key-file and --ssl-cert-file, got one", field="--ssl-key-file"
        )
    if key is None or cert is None:
        return None
    for flag, path in (("--ssl-key-file", key), ("--ssl-cert-file", cert)):
        if not path.is_file():
            raise ConfigError(f"expected a file, got {path}", field=flag)
    return key, cert
