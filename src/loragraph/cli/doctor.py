"""`loragraph doctor`: does an adapter apply, at the right strength, to the right model?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from loragraph.cli import options
from loragraph.cli.flags import in_flags
from loragraph.cli.library import ggml_folder
from loragraph.cli.merge import AsJson, Threads
from loragraph.cli.progress import error_console, step_progress
from loragraph.tools.doctor import Diagnosis, diagnose
from loragraph.tools.doctor.text import read_text

_STYLES = {"problem": "red", "warning": "yellow", "fact": ""}
_SIGNS = {"problem": "✗", "warning": "!", "fact": "·"}


def doctor(
    base: options.Base,
    adapter: options.Adapter,
    peft: Annotated[
        Path | None,
        typer.Option("--peft", metavar="DIR", help="PEFT or MLX folder that it was made from."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Text to measure on.")
    ] = None,
    f16_base: Annotated[
        Path | None,
        typer.Option("--f16-base", metavar="FILE", help="The base before its quantisation."),
    ] = None,
    ignore_norm: options.IgnoreNorm = False,
    tied_output: options.TiedOutput = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check ADAPTER on BASE; exit status 1 where something is wrong with it."""
    with step_progress(error_console(), quiet=as_json) as progress:
        found = diagnose(
            base,
            adapter,
            peft=peft,
            text=None if text is None else read_text(text),
            f16_base=f16_base,
            ignore_norm=ignore_norm,
            tied_output=tied_output,
            n_threads=threads,
            ggml_folder=ggml_folder(),
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        _show(Console(soft_wrap=False), found)
    if not found.ok:
        raise typer.Exit(1)


def _show(console: Console, found: Diagnosis) -> None:
    for finding in found.findings:
        line = f"{_SIGNS[finding.level]} {finding.check}: {in_flags(finding.message)}"
        console.print(Text(line, _STYLES[finding.level]))
    console.print(Text(found.verdict, "green" if found.ok else "red"))
