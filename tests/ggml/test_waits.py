"""How the threads of ggml wait for one another: libgomp tells what it has read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from loragraph.ggml.lib import load_library
load_library()
print("left:", [name for name in os.environ if name == "GOMP_SPINCOUNT"])
"""


def run(**more: str) -> tuple[str, str]:
    """Standard output and error of a process of its own: libgomp reads its variables once."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=env | more,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of ggml does not use libgomp")
    return done.stdout, done.stderr


def test_threads_soon_sleep_and_the_environment_is_as_before() -> None:
    out, err = run()
    assert "GOMP_SPINCOUNT = '500'" in err
    assert "left: []" in out


def test_a_users_spin_count_is_kept() -> None:
    out, err = run(GOMP_SPINCOUNT="7000")
    assert "GOMP_SPINCOUNT = '7000'" in err
    assert "left: ['GOMP_SPINCOUNT']" in out


def test_a_users_wait_policy_is_kept() -> None:
    out, err = run(OMP_WAIT_POLICY="active")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in err
    assert "GOMP_SPINCOUNT = '500'" not in err
    assert "left: []" in out
