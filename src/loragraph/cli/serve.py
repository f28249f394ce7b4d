"""`loragraph serve`: a base and its adapters over HTTP."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Console

from loragraph.cli.serve_flags import ServeFlags, values


def serve(**given: Any) -> None:
    """Serve BASE and adapters over HTTP: OpenAI's routes, llama-server's and vLLM's."""
    flags = ServeFlags(**given)
    adapters = flags.adapters()
    config, plan = flags.config(adapters), flags.plan(adapters)
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    # What these import would slow all other commands.
    if flags.ray:
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


# What typer reads: the flags stand in one place, with their types and defaults.
serve.__signature__ = inspect.signature(ServeFlags, eval_str=True)  # type: ignore[attr-defined]
