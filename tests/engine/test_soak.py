"""A short soak; the long one is scripts/bench soak."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import Soak
from tests.tiny import TinyAdapter, TinyLlama


def test_a_short_soak_leaves_nothing_held_and_every_answer_right(tmp_path: Path) -> None:
    """Random requests, swaps, unloads, cancellations, few cells and slots."""
    tiny = TinyLlama()
    base = tiny.write(tmp_path / "base.gguf")
    sources = [tmp_path / f"{i}.gguf" for i in range(4)]
    for i, path in enumerate(sources):
        TinyAdapter(rank=2 + i, seed=i + 1).write(path, tiny)
    report = Soak(base, sources).run(10, n_cells=256)
    assert report.errors == []
    assert report.differing == []
    assert report.n_requests == report.n_finished + report.n_cancelled + report.n_refused
    assert report.n_finished > 0
    assert report.n_cancelled > 0
    assert report.n_swaps > 0
    assert report.n_early < report.n_compared
