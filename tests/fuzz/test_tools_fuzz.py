"""Damaged files through merge, combine, resize, extract and plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_only_loragraph_errors_come_out(tmp_path: Path) -> None:
    """In a process of its own, which must live; some of the files are still sound enough."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.fuzz.tools_fuzz", "40", "7"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = {line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert {"merge done", "merge GGUFError", "combine done", "plan done"} <= outcomes
