"""The chart of scripts/bench cluster-sim; `python -m benchmarks.cluster_chart JSON PNG` anew."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {
    "random": "#9aa5b1",
    "hash": "#d97706",
    "affinity without spill": "#be185d",
    "affinity with spill": "#2563eb",
}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """First token over load, twice; then the burst: first token and replicas over time. PNG."""
    import matplotlib  # not needed for anything else here

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6))
    names = list(dict.fromkeys(row["popularity"] for row in found["sweep"]))
    for column, name in enumerate(names):
        for policy, colour in _COLOURS.items():
            own = [r for r in found["sweep"] if (r["popularity"], r["policy"]) == (name, policy)]
            x, y = [r["rate"] for r in own], [1000 * r["first_p95_s"] for r in own]
            axes[0][column].plot(x, y, ".-", color=colour, label=policy)
        _style(axes[0][column], f"{name}: first token, p95", "requests/s and replica", "ms")
        axes[0][column].set_yscale("log")
    for row in found["burst"]:
        colour = _COLOURS[row["policy"]]
        t, p95 = zip(*row["p95"], strict=True)
        axes[1][0].plot(t, [1000 * value for value in p95], color=colour)
        t, n = zip(*row["serving"], strict=True)
        axes[1][1].plot(t, n, color=colour)
    axes[1][0].set_yscale("log")
    _style(axes[1][0], "a burst for one adapter: first token, p95", "s", "ms")
    _style(axes[1][1], "replicas that serve that adapter", "s", "")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _style(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draws what scripts/bench cluster-sim --json wrote."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_chart", description=__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.found.read_text()), args.out)


if __name__ == "__main__":
    main()
