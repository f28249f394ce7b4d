"""Spoiled base models: they decode or raise LoragraphError, and the process lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.base_fuzz import run
from tests.fuzz.base_mutations import bases
from tests.fuzz.worker import Worker


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded on Linux only")
@pytest.mark.parametrize("seed", [1, 2])
def test_spoiled_bases(tmp_path: Path, seed: int) -> None:
    """300 files: only answers in bounded time and memory, and some go through to logits."""
    counts, findings = run(300, seed, tmp_path)
    assert findings == []
    assert counts.total() == 300
    assert counts["ok GGUFError"] > 0
    assert counts["ok decoded"] > 0


def test_corpus_decodes_before_it_is_spoiled(tmp_path: Path) -> None:
    """Every right model gives logits, so that the fuzz starts behind the checks."""
    path = tmp_path / "base.gguf"
    with Worker("tests.fuzz.base_worker") as worker:
        for base in bases():
            path.write_bytes(base.data)
            assert worker.check(path) == "ok decoded", base.pairs[:2]
