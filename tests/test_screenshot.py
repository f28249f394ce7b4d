"""The script that makes README's picture of the page, on a tiny model."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.browser import chromium
from tests.test_docs import ROOT
from tests.tiny import TinyAdapter, TinyLlama


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_screenshot(tmp_path: Path) -> None:
    """A picture of the size asked for comes out, though each answer is over before anybody sees
    it begin (it was waited for until the time was up); README's own is at most 300 kB."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    tiny = TinyLlama()
    tiny.write(tmp_path / "base.gguf")
    (tmp_path / "adapters").mkdir()
    for seed, name in enumerate(("json", "pirate", "poem")):
        TinyAdapter(seed=seed).write(tmp_path / "adapters" / f"{name}.gguf", tiny)
    picture = tmp_path / "page.png"
    words = [sys.executable, "-m", "demos.screenshot", "-o", str(picture), "-t", "1", "-n", "1"]
    words += ["--base", str(tmp_path / "base.gguf"), "--adapters", str(tmp_path / "adapters")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(
        [*words, "--width", "800", "--height", "600", "--zoom", "1"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert size(picture) == (800, 600)
    assert (ROOT / "docs" / "page.png").stat().st_size <= 300_000


def size(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height
