"""The chart of scripts/bench serve. `python -m benchmarks.chart CELLS.json OUT.png` draws again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"llama-server": "#9aa5b1", "loragraph": "#2563eb"}
_MODES = {"none": "no adapter", "one": "one adapter\nfor all", "each": "each\nits own"}


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a second, a panel for each base type and number of requests; PNG."""
    import matplotlib  # not needed for anything else here

    matplotlib.use("Agg")
    from matplotlib import pyplot

    types = list(dict.fromkeys(cell["type"] for cell in cells))
    counts = list(dict.fromkeys(cell["n_requests"] for cell in cells))
    figure, axes = pyplot.subplots(
        len(types), len(counts), figsize=(3.1 * len(counts), 2.7 * len(types)), squeeze=False
    )
    for row, type_ in enumerate(types):
        for column, n in enumerate(counts):
            own = [c for c in cells if (c["type"], c["n_requests"]) == (type_, n)]
            _panel(axes[row][column], own, f"{type_}, {n} request{'s' * (n > 1)}")
    axes[0][0].legend(frameon=False, fontsize=8)
    for row in axes:
        row[0].set_ylabel("tokens/s", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axes: Any, cells: Sequence[Mapping[str, Any]], title: str) -> None:
    """Bars of the two servers for each mode, with the range of the rounds."""
    for place, name in ((-0.2, "llama-server"), (0.2, "loragraph")):
        best = [_best(cells, mode, name) for mode in _MODES]
        if not all(best):
            continue
        values = [cell["tokens_per_s"] for cell in best if cell]
        spread = [
            [value - cell["low"] for value, cell in zip(values, best, strict=True) if cell],
            [cell["high"] - value for value, cell in zip(values, best, strict=True) if cell],
        ]
        where = [index + place for index in range(len(_MODES))]
        axes.bar(where, values, 0.36, label=name, color=_COLOURS[name])
        axes.errorbar(where, values, spread, fmt="none", ecolor="#333333", elinewidth=0.8)
        for x, value in zip(where, values, strict=True):
            axes.text(x, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(_MODES)), _MODES.values(), fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _best(cells: Sequence[Mapping[str, Any]], mode: str, server: str) -> Mapping[str, Any] | None:
    """The faster of a server's forms (llama-server has two layouts of KV)."""
    own = [c for c in cells if c["mode"] == mode and c["server"].split(" ")[0] == server]
    return max(own, key=lambda cell: float(cell["tokens_per_s"]), default=None)


def main() -> None:
    """Draws what scripts/bench serve --json wrote."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.cells.read_text()), args.out)


if __name__ == "__main__":
    main()
