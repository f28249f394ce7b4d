"""The model families as data: what the registry says of them, and nothing else."""

from __future__ import annotations

from typing import Any

from loragraph.graph.arch import FAMILIES, REFUSED


def families() -> dict[str, Any]:
    """`families` and `refused`, by general.architecture, as `loragraph models --json` prints."""
    return {
        "families": {
            arch: {
                "models": about.models,
                "real": list(about.real),
                "synthetic": about.synthetic,
                "unsupported": list(about.unsupported),
            }
            for arch, about in sorted((arch, family.about) for arch, family in FAMILIES.items())
        },
        "refused": dict(sorted(REFUSED.items())),
    }
