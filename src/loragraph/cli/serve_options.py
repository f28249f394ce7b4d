"""The options of `loragraph serve`, named as llama-server names its own.

Each can also be given as an environment variable, LORAGRAPH_ and the name in capitals; options that
may be repeated take their values there as one list with commas.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from loragraph.cli.options import AttentionKind, KvType, Lowering

_ADAPTERS, _MEMORY, _MODEL = "Adapters", "Cells, adapters and batches", "Model"
_HTTP, _ACCESS, _ROUTES = "HTTP", "Keys and origins", "Routes"
_RAY = "Many replicas (loragraph\\[ray])"


def variable(name: str) -> str:
    """The environment variable of an option: LORAGRAPH_CTX_SIZE of --ctx-size."""
    return f"LORAGRAPH_{name.strip('-').replace('-', '_').upper()}"


def _option(panel: str, *names: str, text: str, **more: Any) -> Any:
    long = [name.partition("/")[0] for name in names if name.startswith("--")]
    variables = [variable(name) for name in long]
    return typer.Option(*names, help=text, rich_help_panel=panel, envvar=variables, **more)


def _many(panel: str, name: str, text: str, metavar: str, short: Sequence[str] = ()) -> Any:
    """Repeatable: click would split the variable's value at blanks, so it is read elsewhere."""
    return typer.Option(
        *(*short, name),
        help=f"{text} Repeatable, comma-separated. \\[env var: {variable(name)}]",
        rich_help_panel=panel,
        metavar=metavar,
    )


class FlashAttention(StrEnum):
    """llama-server's values of -fa."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


Base = Annotated[
    Path | None,
    typer.Argument(metavar="BASE", help="The base model: a GGUF file.", envvar="LORAGRAPH_MODEL"),
]

# Adapters
Lora = Annotated[
    list[str] | None,
    _many(
        _ADAPTERS,
        "--lora",
        "Adapter (GGUF, or a PEFT or MLX folder). A PATH alone is part of every request that names "
        "no adapters; NAME=PATH only gives it a name.",
        "[NAME=]PATH",
    ),
]
LoraScaled = Annotated[
    list[str] | None,
    _many(_ADAPTERS, "--lora-scaled", "Like --lora PATH, with a scale.", "PATH:SCALE"),
]
InitWithoutApply = Annotated[
    bool,
    _option(
        _ADAPTERS,
        "--lora-init-without-apply",
        text="Requests that name no adapters get the base, until POST /lora-adapters.",
    ),
]
LoraDir = Annotated[
    Path | None,
    _option(
        _ADAPTERS,
        "--lora-dir",
        text="Folder whose NAME.gguf, and PEFT or MLX folders NAME, are adapters by name, loaded "
        "when asked for; others may be loaded from it by path.",
    ),
]
LoraPin = Annotated[
    list[str] | None, _many(_ADAPTERS, "--lora-pin", "Adapter that stays in memory.", "NAME")
]
LoweringOption = Annotated[
    Lowering, _option(_ADAPTERS, "--lowering", text="How adapters are computed; not branch.")
]

# Cells, adapters and batches
CtxSize = Annotated[
    int,
    _option(
        _MEMORY,
        *("-c", "--ctx-size"),
        text="Cells of all requests together, one a token; 0: as many as the base was trained for.",
    ),
]
Parallel = Annotated[
    int, _option(_MEMORY, "-np", "--parallel", text="Most requests computed at once.")
]
MaxModelLen = Annotated[
    int | None,
    _option(_MEMORY, "--max-model-len", text="Most tokens of one request, prompt and answer."),
]
BatchSize = Annotated[
    int, _option(_MEMORY, "-b", "--batch-size", text="Most tokens computed in one step.")
]
MaxWaiting = Annotated[
    int, _option(_MEMORY, "--max-waiting", text="Most requests that wait; more get status 429.")
]
MaxLoras = Annotated[
    int, _option(_MEMORY, "--max-loras", text="Most adapters in memory at a time.")
]
MaxLoraBytes = Annotated[
    str | None,
    _option(
        _MEMORY,
        "--max-lora-bytes",
        text="Most bytes of adapters in memory, as 512M, 2G or 1.5Gi; default: any.",
        metavar="BYTES",
    ),
]
Deadline = Annotated[
    float | None,
    _option(_MEMORY, "--deadline", text="Seconds after which a request ends with status 504."),
]

# Model
ModelFile = Annotated[
    Path | None,
    typer.Option(
        *("-m", "--model"),
        help="The same as BASE, by llama-server's flag.",
        rich_help_panel=_MODEL,
        metavar="FILE",
    ),
]
Alias = Annotated[
    list[str] | None,
    _many(_MODEL, "--alias", "Name of the base; default: its file's name.", "NAME", ("-a",)),
]
Threads = Annotated[
    int | None, _option(_MODEL, "-t", "--threads", text="Default: the CPUs at hand.")
]
Kv = Annotated[KvType | None, _option(_MODEL, "--kv-type", text="Type of the cells; default: f16.")]
CacheTypeK = Annotated[
    KvType | None,
    _option(
        _MODEL, "-ctk", "--cache-type-k", text="llama-server's: has to be the same as that of V."
    ),
]
CacheTypeV = Annotated[KvType | None, _option(_MODEL, "-ctv", "--cache-type-v", text="As -ctk.")]
Attention = Annotated[
    AttentionKind | None,
    _option(_MODEL, "--attention", text="How K and V are read; default: cells."),
]
FlashAttn = Annotated[
    FlashAttention | None,
    _option(
        _MODEL,
        *("-fa", "--flash-attn"),
        text="llama-server's: on and auto are --attention cells, off is plain.",
    ),
]
Repack = Annotated[
    bool,
    _option(_MODEL, "--repack/--no-repack", text="Lay weights out for speed where possible."),
]

# HTTP
Host = Annotated[str, _option(_HTTP, "--host", text="Address to listen at.")]
Port = Annotated[int, _option(_HTTP, "--port", text="Port; 0: any that is free.")]
ApiPrefix = Annotated[
    str,
    _option(
        _HTTP, "--api-prefix", text="Path below which all routes are, as /llm; no slash at its end."
    ),
]
SslKey = Annotated[
    Path | None, _option(_HTTP, "--ssl-key-file", text="Private key (PEM), for HTTPS.")
]
SslCert = Annotated[
    Path | None, _option(_HTTP, "--ssl-cert-file", text="Certificate (PEM), for HTTPS.")
]
ThreadsHttp = Annotated[
    int, _option(_HTTP, "--threads-http", text="Threads that prepare requests.")
]
MaxBodyBytes = Annotated[
    int, _option(_HTTP, "--max-body-bytes", text="Most bytes of a request; more get status 413.")
]
SendTimeout = Annotated[
    float,
    _option(
        _HTTP,
        *("-to", "--send-timeout", "--timeout"),
        text="Seconds after which a client that does not read is cut.",
    ),
]
SsePing = Annotated[
    float,
    _option(
        _HTTP,
        "--sse-ping-interval",
        text="Longest silence of a stream, seconds; then it sends a comment. -1: any.",
    ),
]
DrainTimeout = Annotated[
    float,
    _option(_HTTP, "--drain-timeout", text="Most seconds that running requests get at the end."),
]

# Keys and origins
ApiKey = Annotated[
    list[str] | None, _many(_ACCESS, "--api-key", "Key that requests have to bring.", "KEY")
]
ApiKeyFile = Annotated[
    Path | None, _option(_ACCESS, "--api-key-file", text="File of such keys, one a line.")
]
AdminKey = Annotated[
    list[str] | None,
    _many(
        _ACCESS,
        "--admin-key",
        "Key for routes that change the server; without one they are closed once there are keys.",
        "KEY",
    ),
]
AdminKeyFile = Annotated[
    Path | None, _option(_ACCESS, "--admin-key-file", text="File of such keys, one a line.")
]
AllowedHosts = Annotated[
    list[str] | None,
    _many(
        _ACCESS,
        "--allowed-hosts",
        "Name that requests may call this server by; *: any. Default: any, but localhost,"
        " 127.0.0.1 and ::1 where it listens there and has no key.",
        "NAME",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    _many(
        _ACCESS,
        "--cors-origin",
        "Origin (https://host) whose pages may call this server; default: its own.",
        "ORIGIN",
    ),
]

# Many replicas
Ray = Annotated[
    bool, _option(_RAY, "--ray", text="Serve by replicas on Ray Serve, each with one engine.")
]
Replicas = Annotated[int, _option(_RAY, "--replicas", text="How many.")]
Autoscale = Annotated[
    str | None,
    _option(
        _RAY,
        "--autoscale",
        text="As many as the load needs, in place of --replicas.",
        metavar="MIN:MAX",
    ),
]
RayAddress = Annotated[
    str | None,
    _option(
        _RAY,
        "--ray-address",
        text="A cluster that runs (auto, HOST:PORT); default: one on this machine, on loopback.",
    ),
]
CatalogueDir = Annotated[
    Path | None,
    _option(
        _RAY,
        "--catalogue",
        text="Folder that all machines see, where adapters loaded and swapped over HTTP are kept; "
        "default: for this run only.",
    ),
]
LoraCache = Annotated[
    Path | None,
    _option(_RAY, "--lora-cache", text="Folder of each machine for adapters that were fetched."),
]
LoraScheme = Annotated[
    list[str] | None,
    _many(
        _RAY,
        "--lora-scheme",
        "Scheme of URLs (s3, gs, hf, https, ...) that adapters may be loaded from over HTTP.",
        "SCHEME",
    ),
]

# Routes
Metrics = Annotated[bool, _option(_ROUTES, "--metrics/--no-metrics", text="GET /metrics.")]
Slots = Annotated[bool, _option(_ROUTES, "--slots/--no-slots", text="GET /slots.")]
SlotSavePath = Annotated[
    Path | None,
    _option(
        _ROUTES, "--slot-save-path", text="Folder for POST /slots, which saves and restores cells."
    ),
]
Props = Annotated[bool, _option(_ROUTES, "--props/--no-props", text="POST /props.")]
Page = Annotated[
    bool, _option(_ROUTES, "--page/--no-page", "--webui/--no-webui", text="The page at /.")
]
AccessLog = Annotated[
    Path | None,
    _option(
        _ROUTES,
        "--access-log",
        text="Append a line of JSON for each request to this file; - for standard output.",
        metavar="FILE",
    ),
]
