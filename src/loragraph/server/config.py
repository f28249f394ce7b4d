"""What a server is told at its start. Pure data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loragraph.errors import ConfigError

MAX_BODY_BYTES = 16 << 20

_PREFIX = re.compile(r"(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All that the routes depend on; ConfigError for a value that cannot be used."""

    api_prefix: str = ""  # below which all routes are: /llm; "": none
    aliases: tuple[str, ...] = ()  # names of the base, the first shown; () = its file's name
    api_keys: tuple[str, ...] = ()  # () and no admin key: open to all
    admin_keys: tuple[str, ...] = ()  # for what changes the server; good for all else too
    allowed_hosts: tuple[str, ...] = ()  # that requests may name as Host; () and "*": any
    cors_origins: tuple[str, ...] = ()  # other origins whose pages may call
    default_mix: Mapping[str, float] = field(default_factory=dict)  # of requests that name none
    adapter_dir: Path | None = None  # where adapters may be loaded from
    deadline_s: float | None = None  # of a request
    max_body_bytes: int = MAX_BODY_BYTES
    max_prompts: int = 2048  # in one request
    n_http_threads: int = 16  # that tokenise, render templates and convert schemas
    send_timeout_s: float = 120.0  # a client that reads nothing for so long is cut off
    slot_save_path: Path | None = None  # where slots are saved to; None: POST /slots is closed
    sse_ping_interval_s: float = 30.0  # longest silence of a stream; 0 and below: any
    with_metrics: bool = False  # GET /metrics
    with_slots: bool = True  # GET /slots
    with_props: bool = False  # POST /props
    with_page: bool = True  # the page at /

    def __post_init__(self) -> None:
        for name in ("api_keys", "admin_keys"):
            if not all(getattr(self, name)):
                raise ConfigError("expected keys, got an empty one", field=name)
        if self.api_prefix and not _PREFIX.fullmatch(self.api_prefix):
            raise ConfigError(
                f"expected a path as in /llm/one, got {self.api_prefix!r:.80}", field="api_prefix"
            )
        for name in ("max_body_bytes", "max_prompts", "n_http_threads", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"expected a number above 0, got {getattr(self, name)!r}", field=name
                )
        if "*" in self.cors_origins and (self.api_keys or self.admin_keys) == ():
            raise ConfigError(
                "expected named origins, got '*' without any key",
                field="cors_origins",
                hint="every page in every browser could change this server",
            )

    def ping_s(self, asked_s: float | None) -> float:
        """The longest silence of a stream; a request's own word goes first."""
        seconds = self.sse_ping_interval_s if asked_s is None else asked_s
        return seconds if seconds > 0 else math.inf

    @property
    def has_keys(self) -> bool:
        """Whether requests have to bring a key."""
        return bool(self.api_keys or self.admin_keys)
