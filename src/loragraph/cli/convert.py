"""`loragraph convert`: a PEFT or MLX adapter as a GGUF file for one base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loragraph.adapters.convert import Plan, convert
from loragraph.adapters.convert.write import OUT_TYPES, OutType, out_tensors
from loragraph.cli.inspect import size
from loragraph.cli.library import open_library
from loragraph.cli.progress import ends_in_order, error_console, file_progress

_SHOWN_WARNINGS = 20


def convert_command(
    adapter: Annotated[
        Path, typer.Argument(help="Folder of a PEFT or MLX adapter, or a file in it.")
    ],
    base: Annotated[Path, typer.Option("--base", help="GGUF base that it will run on.")],
    outfile: Annotated[
        Path | None,
        typer.Option("--outfile", "-o", help="File to write; default: beside the folder."),
    ] = None,
    outtype: Annotated[
        str, typer.Option("--outtype", help=f"Type of the tensors: {', '.join(OUT_TYPES)}.")
    ] = "f32",
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the file; default: the folder's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Convert a PEFT or MLX adapter to GGUF; whatever cannot be carried over is refused."""
    with ends_in_order(), file_progress(error_console(), "converting") as progress:
        path, plan = convert(
            adapter,
            base,
            outfile,
            outtype=cast(OutType, outtype),
            name=name,
            dry_run=dry_run,
            lib=open_library(),
            progress=progress,
        )
    if as_json:
        facts = plan.to_dict() | {"outfile": None if dry_run else str(path)}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    _show(Console(), plan, dry_run=dry_run)
    tensors = out_tensors(plan, cast(OutType, outtype))
    nbytes = size(sum(tensor.nbytes for tensor in tensors))
    verb = "would write" if dry_run else "wrote"
    Console().print(Text(f"{verb} {path}: {len(tensors)} tensors, {nbytes}", "green"))


def _show(console: Console, plan: Plan, *, dry_run: bool) -> None:
    facts = plan.to_dict()
    if dry_run:
        _targets(console, facts["targets"])
    changed = ", ".join(
        f"{kind} {n['changed']}/{n['in_base']}"
        for kind, n in facts["coverage"].items()
        if n["changed"]
    )
    lines = [
        f"base: {facts['base']['architecture']} '{facts['base']['name']}'",
        f"changes: {changed}",
        f"alpha: {facts['alpha']:g}",
        f"llama.cpp: {facts['llama_cpp']}",
    ]
    if facts["tied_output"] is not None:
        lines.append(f"tied head follows the token table: {facts['tied_output']}")
    if facts["invocation_tokens"]:
        lines.append(f"invocation tokens: {' '.join(map(str, facts['invocation_tokens']))}")
    for line in lines:
        console.print(Text(line))
    for warning in facts["warnings"][:_SHOWN_WARNINGS]:
        console.print(Text(f"warning: {warning}", "yellow"))


def _targets(console: Console, targets: Sequence[dict[str, Any]]) -> None:
    table = Table("target", "from", "rank", "scale", "folded into lora_b", "also")
    for target in targets:
        modules = ", ".join(target["modules"][:2]) + (" …" if target["n_modules"] > 2 else "")
        also = [key for key in ("magnitude", "bias", "delta") if target[key]]
        also += [f"trained {target['method']}"] if target["method"] in ("weights", "tokens") else []
        row = (
            target["target"],
            modules,
            str(target["rank"] or ""),
            _numbers(target["scales"]),
            _numbers(target["folded"]),
            ", ".join(also),
        )
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)


def _numbers(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:3])
    return shown + (" …" if len(values) > 3 else "")
