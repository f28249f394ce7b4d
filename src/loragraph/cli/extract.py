"""`loragraph extract`: the difference of two models as an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loragraph.cli.combine import OutType
from loragraph.cli.flags import in_flags
from loragraph.cli.inspect import show_table, size
from loragraph.cli.library import ggml_folder
from loragraph.cli.merge import AsJson, Output
from loragraph.cli.progress import ends_in_order, error_console, file_progress
from loragraph.cli.rank_table import rank_facts, show_ranks
from loragraph.tools.extract import ExtractReport
from loragraph.tools.extract import extract as extract_file


def extract(
    tuned: Annotated[Path, typer.Argument(help="The fine-tuned model: a GGUF file.")],
    base: Annotated[Path, typer.Argument(help="The model that it was made from.")],
    output: Output,
    rank: Annotated[int, typer.Option("--rank", help="Largest rank of a target.")],
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Decompose large matrices in full: minutes for each."),
    ] = False,
    outtype: OutType = "f32",
    as_json: AsJson = False,
) -> None:
    """Write the adapter that comes nearest to making TUNED of BASE."""
    console = error_console()
    with ends_in_order(), file_progress(console, "comparing") as progress:
        report = extract_file(
            tuned,
            base,
            output,
            rank=rank,
            exact=exact,
            outtype=outtype,
            ggml_folder=ggml_folder(),
            progress=progress,
        )
    for warning in report.warnings:
        console.print(f"warning: {in_flags(warning)}")
    if as_json:
        typer.echo(json.dumps(_facts(report), indent=2))
        return
    out = Console()
    show_ranks(out, report.choices, report.changes)
    show_table(
        out,
        "Not in the adapter",
        ("tensor", "change", "why"),
        ((left.name, f"{left.change:.3%}", left.reason) for left in report.left),
    )
    worst = min(report.choices, key=lambda choice: choice.energy)
    typer.echo(
        f"{report.path}: {size(report.nbytes)}; {len(report.choices)} targets, least energy "
        f"captured {worst.energy:.2%}, of {worst.target}"
    )


def _facts(report: ExtractReport) -> dict[str, Any]:
    targets = [
        facts | {"change": _finite(report.changes[facts["target"]])}
        for facts in rank_facts(report.choices)
    ]
    return {
        "path": str(report.path),
        "nbytes": report.nbytes,
        "targets": targets,
        "left": [
            {"tensor": left.name, "change": _finite(left.change), "reason": left.reason}
            for left in report.left
        ],
        "warnings": list(report.warnings),
    }


def _finite(change: float) -> float | None:
    """JSON has no infinity: the change of a tensor that was all zeros."""
    return change if change != float("inf") else None
