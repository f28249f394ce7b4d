"""`loragraph merge`: a base and adapters to one model file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loragraph.cli import options
from loragraph.cli.adapter_list import adapter_list
from loragraph.cli.flags import in_flags
from loragraph.cli.inspect import size
from loragraph.cli.library import ggml_folder
from loragraph.cli.progress import ends_in_order, error_console, file_progress
from loragraph.cli.sizes import byte_count
from loragraph.tools.file_type import FILE_TYPES, KEEP
from loragraph.tools.merge import MergeReport
from loragraph.tools.merge import merge as merge_files

_TYPES = ", ".join((KEEP, *FILE_TYPES))

Output = Annotated[Path, typer.Option("-o", "--output", help="The file to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", help="Default: the CPUs at hand.")]


def merge(
    base: options.Base,
    output: Output,
    lora: options.Lora = None,
    lora_scaled: options.LoraScaled = None,
    type_: Annotated[
        str, typer.Option("--type", metavar="TYPE", help=f"Type of the output: {_TYPES}.")
    ] = KEEP,
    split_max_size: Annotated[
        str | None,
        typer.Option("--split-max-size", metavar="SIZE", help="Write parts of at most 2G, 500M, …"),
    ] = None,
    ignore_norm: options.IgnoreNorm = False,
    tied_output: options.TiedOutput = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Add adapters to a base's weights and write the model that results."""
    console = error_console()
    max_bytes = 0 if split_max_size is None else byte_count(split_max_size, "--split-max-size")
    with ends_in_order(), file_progress(console, "merging") as progress:
        report = merge_files(
            base,
            adapter_list(lora or (), lora_scaled or ()),
            output,
            type=type_,
            ignore_norm=ignore_norm,
            tied_output=tied_output,
            max_split_bytes=max_bytes,
            n_threads=threads,
            ggml_folder=ggml_folder(),
            progress=progress,
        )
    for warning in report.warnings:
        console.print(f"warning: {in_flags(warning)}")
    if as_json:
        facts = asdict(report) | {"paths": [str(path) for path in report.paths]}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        typer.echo(_sentence(report))


def _sentence(report: MergeReport) -> str:
    files = report.paths[0] if len(report.paths) == 1 else f"{len(report.paths)} files"
    types = ", ".join(f"{n} {name}" for name, n in report.types.items())
    untied = "; table and head, tied before, are two tensors now" if report.untied else ""
    return (
        f"{files}: {size(report.nbytes)}; {report.n_merged} tensors merged, {report.n_converted} "
        f"more converted, {report.n_copied} copied ({types}){untied}"
    )
