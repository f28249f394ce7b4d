"""`loragraph models`: the model families, what each was tested on, and what is not supported."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loragraph.tools.models import families


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the model families, what each was tested on, and what is not supported."""
    facts = families()
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _show(Console(), facts)


def _show(console: Console, facts: dict[str, Any]) -> None:
    table = Table(title="Families, by general.architecture", title_justify="left")
    for column in (
        "family",
        "models",
        "real models tested",
        "random models against",
        "not supported",
    ):
        table.add_column(column, overflow="fold")
    for arch, entry in facts["families"].items():
        real, unsupported = ("; ".join(entry[name]) or "-" for name in ("real", "unsupported"))
        cells = (arch, entry["models"], real, entry["synthetic"], unsupported)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    console.print("Refused, with the reason:")
    for arch, reason in facts["refused"].items():
        console.print(Text(f"  {arch}: {reason}"))
