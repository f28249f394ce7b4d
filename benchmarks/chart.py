"""The chart of scripts/bench serve. `python -m benchmarks.chart FIGURES.json OUT.png` draws again.

Tokens a second, a panel for each base type and number of requests; below, where a run has them,
first tokens and memory. Of llama-server's two layouts of KV the better is drawn, as in the tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVERS = ("llama-server", "loragraph")
_COLOURS = {"llama-server": "#9aa5b1", "loragraph": "#2563eb"}
_MODES = {"none": "no adapter", "one": "one adapter\nfor all", "each": "each\nits own"}
_MEMORY_KIND = "RssAnon"

Bar = tuple[float, float, float] | None  # value, low, high


def check_chart() -> None:
    """Ends the program where a chart cannot be drawn: before hours of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--chart needs matplotlib: pip install 'loragraph[bench]'")


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """`figures`: what --json writes; PNG."""
    import matplotlib  # not needed for anything else here

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _throughput_rows(figures["cells"])
    more = other_panels(figures)
    n_columns = max([len(row) for row in rows] + [len(more), 1])
    n_rows = len(rows) + bool(more)
    if not n_rows:
        raise ValueError("chart: expected throughput, first tokens or memory, got none of them")
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(3.1 * n_columns, 2.7 * n_rows), squeeze=False
    )
    for row, panels in zip(axes, [*rows, *([more] if more else [])], strict=True):
        for place, panel in zip(row, panels, strict=False):
            _panel(place, **panel)
        for place in row[len(panels) :]:
            place.axis("off")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _throughput_rows(cells: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Panels by base type, then by number of requests."""
    rows = []
    for type_ in dict.fromkeys(cell["type"] for cell in cells):
        panels = []
        for n in dict.fromkeys(cell["n_requests"] for cell in cells):
            own = [c for c in cells if (c["type"], c["n_requests"]) == (type_, n)]
            bars = {
                server: [best_cell(own, mode, server) for mode in _MODES] for server in _SERVERS
            }
            title = f"{type_}, {n} request{'s' * (n > 1)}"
            labels = list(_MODES.values())
            panels.append({"title": title, "labels": labels, "bars": bars, "unit": "tokens/s"})
        rows.append(panels)
    return rows


def other_panels(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """First tokens and memory, as far as there are any."""
    panels = []
    waits = [(wait["case"], wait["server"], wait["ms"]) for wait in figures.get("waits", ())]
    if waits:
        panels.append(_lowest_panel(waits, "first token over a shared prompt", "ms", log=True))
    for state, title in (("registered", "registered adapters"), ("used", "used adapters")):
        own = [
            (str(row["n_adapters"]), row["server"], row[state])
            for row in figures.get("memory", ())
            if row["kind"] == _MEMORY_KIND and row[state] is not None
        ]
        if own:
            panels.append(_lowest_panel(own, title, "MiB", log=False))
    return panels


def _lowest_panel(
    rows: Sequence[tuple[str, str, Mapping[str, float]]], title: str, unit: str, *, log: bool
) -> dict[str, Any]:
    """A panel of (label, server, samples), where lower is better."""
    labels = list(dict.fromkeys(label for label, _, _ in rows))
    bars: dict[str, list[Bar]] = {}
    for server in _SERVERS:
        bars[server] = []
        for label in labels:
            own = [s for place, name, s in rows if place == label and name.split(" ")[0] == server]
            best = min(own, key=lambda samples: samples["median"], default=None)
            bars[server].append(
                None if best is None else (best["median"], best["low"], best["high"])
            )
    shown = [label.replace(" ", "\n", 1) for label in labels]
    return {"title": title, "labels": shown, "bars": bars, "unit": unit, "log": log}


def best_cell(cells: Sequence[Mapping[str, Any]], mode: str, server: str) -> Bar:
    """The faster of a server's forms."""
    own = [c for c in cells if c["mode"] == mode and c["server"].split(" ")[0] == server]
    best = max(own, key=lambda cell: float(cell["tokens_per_s"]), default=None)
    return None if best is None else (best["tokens_per_s"], best["low"], best["high"])


def _panel(
    axes: Any,
    title: str,
    labels: Sequence[str],
    bars: Mapping[str, Sequence[Bar]],
    unit: str,
    log: bool = False,
) -> None:
    """Bars of the two servers for each label, with the range of the rounds."""
    for place, name in ((-0.2, "llama-server"), (0.2, "loragraph")):
        own = [(i + place, bar) for i, bar in enumerate(bars[name]) if bar is not None]
        if not own:
            continue
        where = [x for x, _ in own]
        values = [bar[0] for _, bar in own]
        spread = [[v - low for _, (v, low, _) in own], [high - v for _, (v, _, high) in own]]
        axes.bar(where, values, 0.36, label=name, color=_COLOURS[name])
        axes.errorbar(where, values, spread, fmt="none", ecolor="#333333", elinewidth=0.8)
        for x, value in zip(where, values, strict=True):
            axes.text(x, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set_ylabel(unit, fontsize=8)
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    if log:
        axes.set_yscale("log")
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draws what scripts/bench serve --json wrote."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("figures", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    check_chart()
    draw(json.loads(args.figures.read_text()), args.out)


if __name__ == "__main__":
    main()
