"""`loragraph combine`: several adapters as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from loragraph.cli import options
from loragraph.cli.adapter_list import scaled_path
from loragraph.cli.flags import in_flags
from loragraph.cli.inspect import size
from loragraph.cli.library import ggml_folder
from loragraph.cli.merge import AsJson, Output
from loragraph.cli.progress import ends_in_order, error_console
from loragraph.tools.adapter_file import OUT_TYPES
from loragraph.tools.combine import combine_files

OutType = Annotated[
    str,
    typer.Option("--outtype", metavar="TYPE", help=f"Type of the tensors: {', '.join(OUT_TYPES)}."),
]


def combine(
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="PATH[:SCALE]...", help="Adapters, each with its scale (1)."),
    ],
    output: Output,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", help="Base model that all are checked against; a PEFT or MLX folder needs it."
        ),
    ] = None,
    outtype: OutType = "f32",
    ignore_norm: options.IgnoreNorm = False,
    tied_output: options.TiedOutput = None,
    as_json: AsJson = False,
) -> None:
    """Write one adapter that does what several do together, to be used at scale 1."""
    console = error_console()
    with ends_in_order():
        report = combine_files(
            [scaled_path(text) for text in adapters],
            output,
            base=base,
            outtype=outtype,
            ignore_norm=ignore_norm,
            tied_output=tied_output,
            ggml_folder=ggml_folder(),
        )
    for warning in report.warnings:
        console.print(f"warning: {in_flags(warning)}")
    if as_json:
        facts = {"path": str(report.path), "ranks": dict(report.ranks), "nbytes": report.nbytes}
        typer.echo(json.dumps(facts | {"warnings": list(report.warnings)}, indent=2))
        return
    low, high = min(report.ranks.values(), default=0), max(report.ranks.values(), default=0)
    ranks = f"rank {high}" if low == high else f"ranks {low} to {high}"
    typer.echo(f"{report.path}: {size(report.nbytes)}; {len(report.ranks)} targets, {ranks}")
