"""`loragraph combine`, `resize` and `extract` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loragraph.cli.adapter_list import scaled_path
from loragraph.cli.main import app, main
from loragraph.errors import ConfigError
from loragraph.tools.merge import merge
from tests.tiny import TinyAdapter, TinyLlama


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base, two adapters and a merged model in the working directory."""
    model = TinyLlama(tied=True)
    model.write(tmp_path / "base.gguf")
    TinyAdapter(rank=3).write(tmp_path / "a.gguf", model)
    TinyAdapter(rank=5, seed=2, embeddings=True, alpha=None).write(tmp_path / "b.gguf", model)
    merge(tmp_path / "base.gguf", {tmp_path / "a.gguf": 1.0}, tmp_path / "merged.gguf")
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Any:
    """The result of a command."""
    return CliRunner().invoke(app, args, catch_exceptions=False)


def test_combine() -> None:
    """A line for people, ranks for programs, warnings in the command line's words."""
    args = ("combine", "a.gguf:0.7", "b.gguf", "-o", "c.gguf", "--base", "base.gguf")
    result = run(*args)
    assert result.exit_code == 0
    assert "15 targets, ranks 5 to 8" in result.stdout
    assert "--no-tied-output" in result.stderr
    facts = json.loads(run(*args, "--json", "--no-tied-output").stdout)
    assert facts["ranks"]["token_embd.weight"] == 5
    assert facts["ranks"]["blk.0.attn_q.weight"] == 8


def test_resize() -> None:
    """A table, or JSON, with energy and error of each target."""
    result = run("resize", "a.gguf", "-o", "r.gguf", "--rank", "2")
    assert result.exit_code == 0
    assert "3 to 2" in result.stdout
    assert "largest error" in result.stdout
    facts = json.loads(run("resize", "a.gguf", "-o", "r.gguf", "--energy", "0.5", "--json").stdout)
    assert all(0.5 <= target["energy"] <= 1 for target in facts["targets"])
    assert {target["rank_before"] for target in facts["targets"]} == {3}


def test_extract() -> None:
    """The same, with each target's change of the base."""
    args = ("extract", "merged.gguf", "base.gguf", "--rank", "3", "-o", "x.gguf")
    result = run(*args)
    assert result.exit_code == 0
    assert "14 targets, least energy captured 100.00%" in result.stdout
    facts = json.loads(run(*args, "--json").stdout)
    assert facts["left"] == []
    assert all(0.1 < target["change"] < 1 for target in facts["targets"])


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (("combine", "a.gguf:0", "-o", "c.gguf"), "--lora: expected at least one adapter"),
        (("combine", "no.gguf:0.5", "-o", "c.gguf"), "failed to open"),
        (("combine", "a.gguf:nan", "-o", "c.gguf"), "finite scale"),
        (("resize", "a.gguf", "-o", "r.gguf"), "expected a rank, a share of energy or both"),
        (("resize", "a.gguf", "-o", "a.gguf", "--rank", "1"), "another file than the input"),
        (("extract", "base.gguf", "base.gguf", "--rank", "1", "-o", "x.gguf"), "got equal ones"),
        (("extract", "a.gguf", "base.gguf", "--rank", "1", "-o", "x.gguf"), "expected a base"),
    ],
)
def test_mistakes(args: tuple[str, ...], phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with a reason, status 2."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert phrase in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.gguf", ("a.gguf", 1.0)),
        ("a.gguf:0.5", ("a.gguf", 0.5)),
        ("x:y.gguf", ("x:y.gguf", 1.0)),
        ("x:y.gguf:-2", ("x:y.gguf", -2.0)),
        ("there:1", ("there:1", 1.0)),
    ],
)
def test_paths_with_scales(text: str, expected: tuple[str, float]) -> None:
    """A colon belongs to the path where no number follows, or where such a file exists."""
    Path("there:1").write_text("")
    assert scaled_path(text) == expected


def test_a_scale_without_a_path() -> None:
    """Only a number after a colon is no adapter."""
    with pytest.raises(ConfigError):
        scaled_path(":0.5")
