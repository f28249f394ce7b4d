from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", ["vocab_fuzz.py", "grammar_fuzz.py"])
def test_fuzz_cases_end_in_a_project_error_or_pass(script: str) -> None:
    """A bounded run of the fuzz scripts finds nothing; `SCRIPT N SEED` runs more."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, folder / script, "150", "20"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
