"""Golden files say what they are and stay small enough for the repository."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
INDEXES = [
    ROOT / "tests/golden/tiny_peft/tied.json",
    ROOT / "tests/golden/tiny_peft/untied.json",
    ROOT / "demos/golden/demo.json",
]


@pytest.mark.parametrize("index", INDEXES, ids=lambda p: p.stem)
def test_index_describes_its_arrays(index: Path) -> None:
    """The index carries magic, version and command, and lists every array with dtype and shape."""
    about = json.loads(index.read_text())
    assert (about["magic"], about["version"]) == ("loragraph-golden", 1)
    assert about["made_by"].startswith("python demos/")
    with np.load(index.with_suffix(".npz")) as arrays:
        found = {name: [str(arrays[name].dtype), list(arrays[name].shape)] for name in arrays}
        assert found == about["arrays"]
        assert all(np.isfinite(arrays[name]).all() for name in arrays)
    for case in about["cases"]:
        assert set(case["mix"]) <= set(about["adapters"])
        assert any(name.startswith(f"{case['name']}.") for name in found)


@pytest.mark.parametrize(
    ("folder", "limit_bytes"),
    [
        ("tests/golden/tiny_peft", 600_000),
        ("tests/golden/mlx_variants", 100_000),
        ("demos/golden", 4_000_000),
        ("demos/adapters", 6_000_000),
    ],
)
def test_folder_stays_small(folder: str, limit_bytes: int) -> None:
    """Binary files in the repository stay below the size that was agreed for them."""
    total = sum(path.stat().st_size for path in (ROOT / folder).iterdir())
    assert 0 < total <= limit_bytes
