"""`loragraph serve`: a base and its adapters over HTTP."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from rich.console import Console

from loragraph.cli.serve_flags import ServeFlags, values, without_beaten
from loragraph.errors import ConfigError


def serve(context: typer.Context, **given: Any) -> None:
    """Serve BASE and adapters over HTTP: OpenAI's routes, llama-server's and vLLM's."""
    flags = ServeFlags(**without_beaten(given, context.get_parameter_source))
    adapters = flags.adapters()
    config, plan = flags.config(adapters), flags.plan(adapters)
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    # What these import would slow all other commands.
    if flags.ray:
        _refuse_with_ray(flags)
        from loragraph.cli.serve_ray import ray_plan, run_ray

        schemes = values(flags.lora_scheme, "--lora-scheme")
        many = ray_plan(
            *(flags.replicas, flags.autoscale, flags.ray_address),
            *(flags.catalogue, flags.lora_cache, schemes),
        )
        run_ray(plan, config, many, console)
    else:
        from loragraph.cli.serving import run_server

        run_server(plan, config, console)


def _refuse_with_ray(flags: ServeFlags) -> None:
    """ConfigError for what replicas behind Ray's proxies do not have, lest it be passed over."""
    for flag, value, hint in (
        ("--api-prefix", flags.api_prefix, "let a proxy in front cut the prefix off"),
        ("--slot-save-path", flags.slot_save_path, "each replica has slots and cells of its own"),
    ):
        if value:
            raise ConfigError("expected none together with --ray", field=flag, hint=hint)


def _signature() -> inspect.Signature:
    """What typer reads: the flags stand in one place, with their types and defaults."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    flags = inspect.signature(ServeFlags, eval_str=True)
    return flags.replace(parameters=[*flags.parameters.values(), context])


serve.__signature__ = _signature()  # type: ignore[attr-defined]
