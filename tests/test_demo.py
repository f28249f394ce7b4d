"""The demo, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT
from tests.tiny import TinyAdapter, TinyLlama


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The demo's command with a tiny base and two adapters."""
    tiny = TinyLlama()
    tiny.write(tmp_path / "base.gguf")
    (tmp_path / "adapters").mkdir()
    for seed, name in enumerate(("alpha", "beta")):
        TinyAdapter(seed=seed).write(tmp_path / "adapters" / f"{name}.gguf", tiny)
    demo = str(ROOT / "demos" / "demo.py")
    files = ("--base", str(tmp_path / "base.gguf"), "--adapters", str(tmp_path / "adapters"))
    return [sys.executable, demo, *files, "-n", "4", "-t", "1"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The finished process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.mark.parametrize("flags", [(), ("--plain",)])
def test_demo(words: list[str], flags: tuple[str, ...]) -> None:
    """Without a terminal the base, each adapter and both together answer, with their speed."""
    done = run(*words, "--question", "Why [bold]?", *flags)

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "Why [bold]?" in done.stdout
    lines = done.stdout.splitlines()
    titles = ["base", "alpha", "beta", "alpha at 0.6 + beta at 0.6"]
    assert [line for line in lines if line in titles] == titles
    assert sum("tokens/s" in line for line in lines) == 4


def test_mix(words: list[str]) -> None:
    """--mix chooses the adapters of the last answer; unknown names and bad scales are refused."""
    assert "beta at 2 + alpha at -1\n" in run(*words, "--mix", "beta:2,alpha:-1").stdout
    for mix in ("gamma:1", "alpha", "alpha:x"):
        done = run(*words, "--mix", mix)
        assert done.returncode == 1
        assert done.stderr.startswith("demo: --mix: expected")


def test_mistakes(words: list[str], tmp_path: Path) -> None:
    """A wrong file is one line on stderr."""
    (tmp_path / "adapters" / "alpha.gguf").write_bytes(b"junk")
    done = run(*words)

    assert done.returncode == 1
    assert done.stderr.startswith("demo: ")
    assert done.stderr.count("\n") == 1
