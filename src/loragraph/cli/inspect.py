"""`loragraph inspect`: what a GGUF file holds, and whether an adapter fits a base."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loragraph.cli.flags import in_flags
from loragraph.cli.library import open_library
from loragraph.tools.inspect import inspect_file

_LONG_VALUE = 72


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="A GGUF file: a base model or an adapter. With --base also a PEFT or MLX folder."
        ),
    ],
    base: Annotated[
        Path | None, typer.Option("--base", help="Base model that an adapter is checked against.")
    ] = None,
    ignore_norm: Annotated[
        bool, typer.Option("--ignore-norm", help="Leave norm weights of the adapter out.")
    ] = False,
    tied_output: Annotated[
        bool | None,
        typer.Option(
            "--tied-output/--no-tied-output",
            help="Whether a token table's adapter changes a tied head too. "
            "Default: as the file says.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what FILE holds; exit status 1 where it would be refused."""
    facts = inspect_file(
        open_library(), file, base, ignore_norm=ignore_norm, tied_output=tied_output
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _show(Console(), facts)
    if facts["problems"]:
        raise typer.Exit(1)


def _show(console: Console, facts: dict[str, Any]) -> None:
    is_adapter = facts["kind"] == "adapter"
    show_table(console, "Metadata", ("key", "value"), facts["metadata"].items())
    summary = _adapter_summary(facts) if is_adapter else _base_summary(facts)
    show_table(console, "Adapter" if is_adapter else "Base", ("", ""), summary)
    show_table(
        console,
        "Tensor types",
        ("type", "tensors", "parameters", "bytes"),
        (
            (name, n["n_tensors"], f"{n['n_params']:,}", size(n["nbytes"]))
            for name, n in facts["types"].items()
        ),
    )
    if is_adapter:
        _show_targets(console, facts)
    for warning in facts.get("warnings", ()):
        console.print(Text(f"warning: {in_flags(warning)}", "yellow"))
    for problem in facts["problems"]:
        message = in_flags(problem["message"])
        console.print(Text(f"refused: {message} [{problem['error']}]", "red"))
    if is_adapter and not facts["problems"]:
        verdict = "fits the base" if facts["base"] else "well-formed; --base checks the fit"
        console.print(Text(verdict, "green"))


def _show_targets(console: Console, facts: dict[str, Any]) -> None:
    show_table(
        console,
        "Targets",
        ("kind", "changed", "ranks"),
        (
            (name, _of(entry["changed"], entry["in_base"]), ", ".join(map(str, entry["ranks"])))
            for name, entry in facts["targets"].items()
        ),
    )
    show_table(
        console,
        "Weights",
        ("target", "rank", "effective scale", "types", "bytes"),
        (
            (
                " + ".join([weight["target"], *weight["vectors"]]),
                weight["rank"] or "",
                _number(weight["scale"]),
                " ".join(dict.fromkeys(weight["types"])),
                size(weight["nbytes"]),
            )
            for weight in facts["weights"]
        ),
    )


def _base_summary(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    tied = {None: "?", True: "tied to token_embd", False: "of its own"}[facts["tied"]]
    return [
        ("files", "\n".join(facts["files"])),
        ("architecture", facts["architecture"] or "?"),
        ("name", facts["name"] or "?"),
        ("output head", tied),
        ("tensors", facts["n_tensors"]),
        ("parameters", f"{facts['n_params']:,}"),
        ("bytes", size(facts["tensor_bytes"])),
    ]


def _adapter_summary(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("file", facts["files"][0]),
        ("architecture", facts["architecture"] or "?"),
        ("digest", facts["digest"] or "-"),
        ("alpha", _number(facts["alpha"]) if facts["alpha"] is not None else "missing"),
        ("tensors", facts["n_tensors"]),
        ("parameters", f"{facts['n_params']:,}"),
        ("bytes", size(facts["tensor_bytes"])),
    ]
    if facts["tied_output"] is not None:
        both = "changes the tied head too" if facts["tied_output"] else "leaves the tied head alone"
        rows.append(("token table's pair", both))
    if facts["invocation_tokens"]:
        rows.append(("invocation tokens", " ".join(map(str, facts["invocation_tokens"]))))
    if facts["base"]:
        base = facts["base"]
        rows.append(("base", f"{base['name']} ({base['architecture']})"))
        rows.append(("share of the base", f"{base['share']:.2%} of {base['n_params']:,}"))
    return rows


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 MB (powers of 1,000)."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} GB"


def _of(changed: int, in_base: int | None) -> str:
    return str(changed) if in_base is None else f"{changed}/{in_base}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def show_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Prints a table; nothing where there are no rows."""
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    if table.row_count:
        console.print(table)


def _cell(value: Any) -> Text:
    text = str(value)
    if len(text) > 4 * _LONG_VALUE:
        text = f"{text[:_LONG_VALUE]}… ({len(text):,} characters)"
    return Text(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )
