"""The flags of `loragraph serve` as they were given, and what a server is told by them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from loragraph.cli import serve_options as options
from loragraph.cli.adapter_list import csv_fields
from loragraph.cli.options import AttentionKind, KvType, Lowering
from loragraph.cli.serve_plan import Plan, ServedAdapter, served_adapters
from loragraph.cli.sizes import byte_count
from loragraph.errors import ConfigError
from loragraph.server.config import MAX_BODY_BYTES, ServerConfig

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_KEY_FILE = 1 << 20
_FLASH_ATTN = {
    options.FlashAttention.ON: AttentionKind.CELLS,
    options.FlashAttention.AUTO: AttentionKind.CELLS,
    options.FlashAttention.OFF: AttentionKind.PLAIN,
}
# Fields that a variable may give, and those that say the same: a flag beats the variable of either.
_OTHER_NAMES = {
    "base": ("model",),
    "model": ("base",),
    "kv_type": ("cache_type_k", "cache_type_v"),
    "cache_type_k": ("kv_type",),
    "cache_type_v": ("kv_type",),
    "attention": ("flash_attn",),
    "flash_attn": ("attention",),
    "autoscale": ("replicas",),
}

E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """A field a flag; typer makes the command's options of them."""

    base: options.Base = None
    lora: options.Lora = None
    lora_scaled: options.LoraScaled = None
    lora_init_without_apply: options.InitWithoutApply = False
    lora_dir: options.LoraDir = None
    lora_pin: options.LoraPin = None
    lowering: options.LoweringOption = Lowering.ROUTED
    ctx_size: options.CtxSize = 8192
    parallel: options.Parallel = 32
    max_model_len: options.MaxModelLen = None
    batch_size: options.BatchSize = 512
    max_waiting: options.MaxWaiting = 1024
    max_loras: options.MaxLoras = 64
    max_lora_bytes: options.MaxLoraBytes = None
    deadline: options.Deadline = None
    model: options.ModelFile = None
    alias: options.Alias = None
    threads: options.Threads = None
    kv_type: options.Kv = None
    cache_type_k: options.CacheTypeK = None
    cache_type_v: options.CacheTypeV = None
    attention: options.Attention = None
    flash_attn: options.FlashAttn = None
    repack: options.Repack = True
    host: options.Host = "127.0.0.1"
    port: options.Port = 8080
    api_prefix: options.ApiPrefix = ""
    ssl_key_file: options.SslKey = None
    ssl_cert_file: options.SslCert = None
    threads_http: options.ThreadsHttp = 16
    max_body_bytes: options.MaxBodyBytes = MAX_BODY_BYTES
    send_timeout: options.SendTimeout = 120.0
    sse_ping_interval: options.SsePing = 30.0
    drain_timeout: options.DrainTimeout = 30.0
    api_key: options.ApiKey = None
    api_key_file: options.ApiKeyFile = None
    admin_key: options.AdminKey = None
    admin_key_file: options.AdminKeyFile = None
    allowed_hosts: options.AllowedHosts = None
    cors_origin: options.CorsOrigin = None
    metrics: options.Metrics = False
    slots: options.Slots = True
    slot_save_path: options.SlotSavePath = None
    props: options.Props = False
    page: options.Page = True
    access_log: options.AccessLog = None
    ray: options.Ray = False
    replicas: options.Replicas = 1
    autoscale: options.Autoscale = None
    ray_address: options.RayAddress = None
    catalogue: options.CatalogueDir = None
    lora_cache: options.LoraCache = None
    lora_scheme: options.LoraScheme = None

    def adapters(self) -> list[ServedAdapter]:
        """Those of --lora and --lora-scaled."""
        plain, scaled = values(self.lora, "--lora"), values(self.lora_scaled, "--lora-scaled")
        return served_adapters(plain, scaled, self.lora_dir)

    def config(self, adapters: Sequence[ServedAdapter]) -> ServerConfig:
        """What its routes depend on; ConfigError."""
        api_keys = _keys(self.api_key, "--api-key", self.api_key_file)
        admin_keys = _keys(self.admin_key, "--admin-key", self.admin_key_file)
        hosts = tuple(name.lower() for name in values(self.allowed_hosts, "--allowed-hosts"))
        if not hosts and not (api_keys or admin_keys) and self.host in _LOOPBACK:
            hosts = _LOOPBACK
        return ServerConfig(
            api_prefix=self.api_prefix,
            aliases=tuple(values(self.alias, "--alias")),
            api_keys=api_keys,
            admin_keys=admin_keys,
            allowed_hosts=hosts,
            cors_origins=tuple(values(self.cors_origin, "--cors-origin")),
            default_mix={} if self.lora_init_without_apply else _default_mix(adapters),
            adapter_dir=self.lora_dir,
            deadline_s=self.deadline,
            max_body_bytes=self.max_body_bytes,
            n_http_threads=self.threads_http,
            send_timeout_s=self.send_timeout,
            slot_save_path=_folder(self.slot_save_path, "--slot-save-path"),
            sse_ping_interval_s=self.sse_ping_interval,
            with_metrics=self.metrics,
            with_slots=self.slots,
            with_props=self.props,
            with_page=self.page,
        )

    def plan(self, adapters: Sequence[ServedAdapter]) -> Plan:
        """What to load and where to listen; ConfigError."""
        return Plan(
            base=self._base(),
            adapters=adapters,
            pinned=tuple(values(self.lora_pin, "--lora-pin")),
            adapter_dir=self.lora_dir,
            n_ctx=self.ctx_size,
            max_model_len=self.max_model_len,
            threads=self.threads,
            repack=self.repack,
            engine_options={
                "max_batch_tokens": self.batch_size,
                "max_sequences": self.parallel,
                "max_waiting": self.max_waiting,
                "max_adapters": self.max_loras,
                "max_adapter_bytes": _bytes(self.max_lora_bytes, "--max-lora-bytes"),
                "lowering": self.lowering.value,
                "attention": self._attention().value,
                "kv_type": self._kv_type().value,
            },
            host=self.host,
            port=self.port,
            tls=_tls(self.ssl_key_file, self.ssl_cert_file),
            drain_timeout_s=self.drain_timeout,
            access_log=self.access_log,
        )

    def _base(self) -> Path:
        """BASE or -m; ConfigError for none, and for two that differ."""
        given = {path for path in (self.base, self.model) if path is not None}
        if len(given) != 1:
            raise ConfigError(
                f"expected BASE, or -m in its place, got {'both' if given else 'neither'}",
                field="BASE",
            )
        return given.pop()

    def _kv_type(self) -> KvType:
        k, v = self.cache_type_k, self.cache_type_v
        if (k or KvType.F16) != (v or KvType.F16):
            raise ConfigError(
                f"expected one type of K and V, got {k or KvType.F16} and {v or KvType.F16}",
                field="-ctk",
                hint="give -ctk and -ctv the same type, or use --kv-type",
            )
        return _one(self.kv_type, k or v, ("--kv-type", "-ctk")) or KvType.F16

    def _attention(self) -> AttentionKind:
        asked = None if self.flash_attn is None else _FLASH_ATTN[self.flash_attn]
        return _one(self.attention, asked, ("--attention", "-fa")) or AttentionKind.CELLS


def without_beaten(given: Mapping[str, Any], source: Callable[[str], Any]) -> dict[str, Any]:
    """The flags without what a variable says by one name and the command line by another.

    `source`: click's ParameterSource of a field.
    """

    def comes_from(field: str, place: str) -> bool:
        return getattr(source(field), "name", "") == place

    beaten = {
        field
        for field, others in _OTHER_NAMES.items()
        if comes_from(field, "ENVIRONMENT")
        and any(comes_from(other, "COMMANDLINE") for other in others)
    }
    return {field: None if field in beaten else value for field, value in given.items()}


def _one(own: E | None, theirs: E | None, flags: tuple[str, str]) -> E | None:
    """What our flag or llama-server's says; ConfigError where they disagree."""
    if own is not None and theirs is not None and own != theirs:
        raise ConfigError(f"{flags[0]} and {flags[1]} disagree: {own} and {theirs}", field=flags[1])
    return theirs if own is None else own


def _bytes(text: str | None, flag: str) -> int | None:
    return None if text is None else byte_count(text, flag)


def values(given: Sequence[str] | None, flag: str) -> list[str]:
    """The values of a repeatable option, or those of its environment variable."""
    if given is None:
        text = os.environ.get(options.variable(flag), "")
        given = [text] if text else []
    return [field for value in given for field in csv_fields(value, flag)]


def _default_mix(adapters: Sequence[ServedAdapter]) -> dict[str, float]:
    return {one.name: one.scale for one in adapters if one.scale is not None}


def _keys(given: Sequence[str] | None, flag: str, file: Path | None) -> tuple[str, ...]:
    keys = values(given, flag)
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
