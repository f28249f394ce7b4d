"""The table of ranks that `extract` and `resize` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from loragraph.cli.inspect import show_table
from loragraph.tools.resize import RankChoice


def show_ranks(
    console: Console, choices: Sequence[RankChoice], changes: Mapping[str, float] | None = None
) -> None:
    """One row a target: rank, captured energy, relative error; `changes` relative to the base."""
    columns = ["target", "rank", "captured energy", "error"]
    rows: list[list[Any]] = []
    for choice in choices:
        before = f"{choice.rank_before} to " if choice.rank_before else ""
        row = [
            choice.target,
            f"{before}{choice.rank}",
            f"{choice.energy:.4%}",
            f"{choice.error:.3g}",
        ]
        if changes is not None:
            row.append(f"{changes[choice.target]:.3%}")
        rows.append(row)
    show_table(console, "Ranks", [*columns, *(["change of the base"] if changes else [])], rows)


def rank_facts(choices: Sequence[RankChoice]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "target": choice.target,
            "rank_before": choice.rank_before or None,
            "rank": choice.rank,
            "energy": choice.energy,
            "error": choice.error,
        }
        for choice in choices
    ]
