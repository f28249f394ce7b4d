"""`loragraph resize`: an adapter to a smaller rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loragraph.cli import options
from loragraph.cli.combine import OutType
from loragraph.cli.flags import in_flags
from loragraph.cli.inspect import size
from loragraph.cli.library import ggml_folder
from loragraph.cli.merge import AsJson, Output
from loragraph.cli.progress import ends_in_order, error_console
from loragraph.cli.rank_table import rank_facts, show_ranks
from loragraph.tools.resize import resize_file


def resize(
    adapter: options.Adapter,
    output: Output,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Largest rank that a target keeps.")
    ] = None,
    energy: Annotated[
        float | None,
        typer.Option("--energy", help="Share of each change to keep: 0.99. The rank follows."),
    ] = None,
    outtype: OutType = "f32",
    base: Annotated[
        Path | None, typer.Option("--base", help="Base model that it is for; of a folder needed.")
    ] = None,
    ignore_norm: options.IgnoreNorm = False,
    as_json: AsJson = False,
) -> None:
    """Write ADAPTER with smaller ranks, and show what each target loses."""
    with ends_in_order():
        report = resize_file(
            adapter,
            output,
            rank=rank,
            energy=energy,
            outtype=outtype,
            base=base,
            ignore_norm=ignore_norm,
            ggml_folder=ggml_folder(),
        )
    for warning in report.warnings:
        error_console().print(f"warning: {in_flags(warning)}")
    if as_json:
        facts = {
            "path": str(report.path),
            "nbytes_before": report.nbytes_before,
            "nbytes": report.nbytes,
            "targets": rank_facts(report.choices),
            "warnings": list(report.warnings),
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    show_ranks(Console(), report.choices)
    worst = max(report.choices, key=lambda choice: choice.error)
    typer.echo(
        f"{report.path}: {size(report.nbytes)} instead of {size(report.nbytes_before)}; largest "
        f"error {worst.error:.3g}, of {worst.target}"
    )
