"""What `loragraph serve` tells once it has loaded: adapters, memory, where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loragraph.adapters.base import TargetKind
from loragraph.cli.inspect import size
from loragraph.engine.engine import Engine
from loragraph.errors import LoragraphError
from loragraph.server.state import ServerState

_MAX_ROWS = 100


def show_report(console: Console, state: ServerState, options: Mapping[str, Any], url: str) -> None:
    """The table of adapters, the memory plan and the address; `options` are the engine's."""
    engine = state.engine
    model = engine.model
    console.print(f"base      {state.base_name}: {model.hparams.arch}, {model.path}")
    _show_adapters(console, state)
    for line in _memory_lines(engine, options):
        console.print(line, soft_wrap=True)
    limit = engine.config.sequence_limit
    console.print(
        f"requests  {engine.config.max_sequences} at once, {limit} tokens each, "
        f"{engine.config.n_cells} together",
        soft_wrap=True,
    )
    keys = "" if state.config.has_keys else ", open to all who reach it"
    console.print(f"listening at {url}{keys}", soft_wrap=True)


def _show_adapters(console: Console, state: ServerState) -> None:
    refused = _refused(state.engine)
    rows = state.engine.adapters
    if not rows:
        console.print("adapters  none")
        return
    targets = state.engine.model.base_info.targets.values()
    n_targets = sum(target.kind is not TargetKind.NONE for target in targets)
    current, ids = state.engine.registry.current(), state.sync_ids()
    table = Table(title="Adapters", title_justify="left")
    for column in ("id", "name", "by default", "rank", "weights", "bytes", "state", "file"):
        table.add_column(column, overflow="fold")
    for row in sorted(rows, key=lambda row: ids.get(row.name, 0))[:_MAX_ROWS]:
        generation = current.get(row.name)
        scale = state.default_mix.get(row.name)
        cells = (
            ids.get(row.name, "?"),
            row.name,
            "-" if scale is None else f"{scale:g}",
            "?" if row.rank_max is None else row.rank_max,
            "?" if generation is None else f"{generation.header.n_targets} of {n_targets}",
            "?" if row.nbytes is None else size(row.nbytes),
            f"{row.state.value}, aLoRA" if row.is_alora else row.state.value,
            "" if row.path is None else row.path.name,
        )
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
    if len(rows) > _MAX_ROWS:
        console.print(f"and {len(rows) - _MAX_ROWS} more")
    for message in refused:
        console.print(f"refused   {message}", soft_wrap=True)


def _refused(engine: Engine) -> list[str]:
    """Reads the headers of the first adapters; what is wrong with those that cannot be used."""
    problems = []
    for name in engine.registry.names()[:_MAX_ROWS]:
        try:
            engine.registry.resolve(name)
        except LoragraphError as error:
            problems.append(str(error))
    return problems


def _memory_lines(engine: Engine, options: Mapping[str, Any]) -> list[str]:
    weights = engine.model.weights.nbytes
    kinds = ", ".join(f"{size(nbytes)} {kind}" for kind, nbytes in weights.items() if nbytes)
    working = engine.nbytes
    limit = options["max_adapter_bytes"]
    most = "of any size" if limit is None else f"{size(limit)} in all"
    return [
        f"memory    weights {size(sum(weights.values()))} ({kinds}), "
        f"cells {size(working['cells'])}, "
        f"steps {size(working['inputs'] + working['compute'])} by now",
        f"          adapters: up to {options['max_adapters']} in memory, {most}",
    ]
