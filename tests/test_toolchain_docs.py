"""The examples of docs/toolchain.md run, in order, with tiny models in place of the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loragraph.cli.main import app
from tests.adapters.convert.test_golden import GOLDEN, base_of, converted
from tests.test_docs import ROOT, code_blocks, commands

PAGE = ROOT / "docs" / "toolchain.md"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base, the folder and the other adapter that the page names."""
    shutil.copy(base_of("plain"), tmp_path / "base.gguf")
    shutil.copytree(GOLDEN / "plain", tmp_path / "pirate-peft")
    assert base_of("rslora") == base_of("plain")
    path, _ = converted("rslora", tmp_path)
    path.rename(tmp_path / "poem.gguf")
    monkeypatch.chdir(tmp_path)


def test_every_command_of_the_worked_example_runs() -> None:
    """One after another, each with the files that those before it made."""
    shown = [command.words for command in commands(PAGE) if "BASE" not in command.words]
    shown = [words for words in shown if words[0] == "loragraph" and "-o" not in words[-1:]]
    runs = [words[1:] for words in shown if any(word.endswith(".gguf") for word in words)]
    assert len(runs) >= 10
    for words in runs:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, (words, result.output)
        assert result.stdout
    for name in ("merged.gguf", "merged-q4.gguf", "both-r8.gguf", "extracted.gguf"):
        assert Path(name).stat().st_size > 1000


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The functions do what the commands do."""
    shutil.copy("poem.gguf", "pirate.gguf")
    (block,) = code_blocks(PAGE.read_text("utf-8"), {"python"})
    exec(compile(block, PAGE.name, "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 6
