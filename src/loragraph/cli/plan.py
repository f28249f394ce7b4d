"""`loragraph plan`: what a base and its adapters cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from loragraph.cli import options
from loragraph.cli.adapter_list import adapter_list
from loragraph.cli.inspect import show_table, size
from loragraph.cli.library import ggml_folder
from loragraph.cli.merge import AsJson
from loragraph.cli.sizes import byte_count
from loragraph.tools.plan import Cost, Plan
from loragraph.tools.plan import plan as make_plan

_SUPPOSED_RANKS = (8, 16, 64)


def plan(
    base: options.Base,
    lora: options.Lora = None,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", help="Suppose an F16 adapter of this rank on all. Repeatable."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="Memory for all together: 2G, 800M, …"),
    ] = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", help="Cells: tokens of all sequences together.")
    ] = 4096,
    kv_type: Annotated[
        options.KvType, typer.Option("--kv-type", help="Type of the KV cells.")
    ] = options.KvType.F16,
    as_json: AsJson = False,
) -> None:
    """Show memory, work and traffic of BASE and adapters, and how many adapters fit."""
    paths = [path for path, _ in adapter_list(lora or (), ())]
    facts = make_plan(
        base,
        paths,
        ranks=rank or (() if paths else _SUPPOSED_RANKS),
        budget_bytes=0 if budget is None else byte_count(budget, "--budget"),
        n_ctx=ctx_size,
        kv_type=kv_type.value,
        ggml_folder=ggml_folder(),
    )
    if as_json:
        typer.echo(json.dumps(facts.to_dict(), indent=2))
    else:
        _show(Console(), facts)


def _show(console: Console, plan: Plan) -> None:
    show_table(
        console,
        "Memory",
        ("", "targets", "ranks", "a layer", "bytes a layer", "parameters", "bytes", "share"),
        _memory_rows(plan),
    )
    show_table(
        console,
        "One token, computed alone",
        ("", "multiply-adds", "of the base", "bytes read", "of the base"),
        _token_rows(plan),
    )
    rows = [
        ("base, all tensors", size(plan.base_bytes)),
        ("one cell (K and V of a token)", size(plan.bytes_cell)),
        (f"{plan.n_ctx:,} cells", size(plan.cells_bytes)),
    ]
    if plan.budget_bytes:
        rows.append(("budget", size(plan.budget_bytes)))
        if plan.left_bytes < 0:
            rows.append(("missing", size(-plan.left_bytes)))
        else:
            rows.append(("left for adapters", size(plan.left_bytes)))
        for adapter in plan.adapters:
            rows.append((f"adapters like {adapter.name}", f"{plan.fitting(adapter):,}"))
    show_table(console, "Budget" if plan.budget_bytes else "Beside the adapters", ("", ""), rows)


def _memory_rows(plan: Plan) -> Iterator[tuple[Any, ...]]:
    for cost in (plan.base, *plan.adapters):
        share = "" if cost is plan.base else f"{cost.params / plan.base.params:.2%}"
        yield (
            cost.name,
            cost.n_targets,
            _ranks(cost),
            _millions(cost.params_layers / plan.n_layer),
            size(cost.nbytes_layers / plan.n_layer),
            _millions(cost.params),
            size(cost.nbytes),
            share,
        )


def _token_rows(plan: Plan) -> Iterator[tuple[Any, ...]]:
    base = plan.base
    for cost in (base, *plan.adapters):
        is_base = cost is base
        yield (
            cost.name,
            _millions(cost.macs),
            "" if is_base else f"+{cost.macs / base.macs:.2%}",
            size(cost.bytes_token),
            "" if is_base else f"+{cost.bytes_token / base.bytes_token:.2%}",
        )


def _ranks(cost: Cost) -> str:
    low, high = cost.ranks
    return "" if not high else str(high) if low == high else f"{low} to {high}"


def _millions(number: float) -> str:
    """1.25 M, 812 k, 96."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"
