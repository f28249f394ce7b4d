"""README's examples run, with a tiny model in place of the files that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loragraph.cli.main import app
from loragraph.tools.merge import merge
from tests.test_docs import GUIDES, code_blocks, commands
from tests.tiny import TinyAdapter, TinyLlama

README = GUIDES[0]
TOOLS = {"merge", "combine", "resize", "extract", "plan", "doctor"}
RUNS = [
    command.words[1:]
    for command in commands(README)
    if command.words[0] == "loragraph"
    and command.words[1] in {*TOOLS, "run", "inspect"}
    and not any(word.startswith("$") for word in command.words)
    and any(word.endswith(".gguf") for word in command.words)
]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that README names, in the working directory."""
    tiny = TinyLlama()
    tiny.write(tmp_path / "base.gguf")
    for seed, name in enumerate(("pirate", "poem")):
        TinyAdapter(seed=seed, b_std=0.01).write(tmp_path / f"{name}.gguf", tiny)
    merge(tmp_path / "base.gguf", {tmp_path / "pirate.gguf": 1.0}, tmp_path / "merged.gguf")
    TinyAdapter(seed=3).write(tmp_path / "both.gguf", tiny)
    (tmp_path / "question.txt").write_text("Why?")
    monkeypatch.chdir(tmp_path)


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Every python block of README runs."""
    blocks = code_blocks(README.read_text("utf-8"), {"python"})

    assert blocks
    for block in blocks:
        exec(compile(block, README.name, "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_commands(words: tuple[str, ...]) -> None:
    """Every command line of README that names an example file does what it says."""
    quick = ("-t", "1", "-n", "4") if words[0] == "run" else ()
    result = CliRunner().invoke(app, [*words, *quick], input="Why?", catch_exceptions=False)

    assert result.exit_code == 0
    assert result.stdout


def test_commands_are_found() -> None:
    """The search for README's command lines finds them."""
    assert len(RUNS) >= 12
