"""`loragraph merge` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from loragraph.cli.flags import in_flags
from loragraph.cli.main import app, main
from loragraph.cli.sizes import byte_count
from loragraph.errors import ConfigError
from tests.tiny import TinyAdapter, TinyLlama


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base and two adapters in the working directory."""
    model = TinyLlama(tied=True)
    model.write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", model)
    TinyAdapter(seed=2, embeddings=True).write(tmp_path / "b.gguf", model)
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Any:
    """The result of `loragraph merge`."""
    return CliRunner().invoke(app, ["merge", "base.gguf", *args], catch_exceptions=False)


def test_one_line_says_what_was_done() -> None:
    """Sizes, counts and types on standard output, warnings on standard error."""
    result = run("--lora", "a.gguf", "--lora-scaled", "b.gguf:0.5", "-o", "out.gguf")
    assert result.exit_code == 0
    assert "15 tensors merged, 0 more converted, 5 copied" in result.stdout
    assert "--no-tied-output" in result.stderr  # not tied_output=False, as Python says
    assert len(GGUFReader("out.gguf").tensors) == 20


def test_json() -> None:
    """--json gives the report."""
    result = run("--lora", "b.gguf", "--no-tied-output", "--type", "f16", "-o", "o.gguf", "--json")
    facts = json.loads(result.stdout)
    assert facts["paths"] == ["o.gguf"]
    assert (facts["n_merged"], facts["untied"]) == (15, True)
    assert facts["types"] == {"f16": 16, "f32": 5}


def test_split() -> None:
    """--split-max-size writes parts."""
    assert run("--lora", "a.gguf", "-o", "out.gguf", "--split-max-size", "100K").exit_code == 0
    assert not Path("out.gguf").exists()
    assert len(list(Path().glob("out-0000?-of-0000?.gguf"))) > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lora", "a.gguf", "-o", "base.gguf"], "-o: expected another file than the input"),
        (["-o", "out.gguf"], "--lora: expected at least one adapter"),
        (["--lora", "a.gguf", "-o", "o.gguf", "--type", "x"], "--type: expected one of keep, f32"),
        (["--lora", "a.gguf", "-o", "o.gguf", "--split-max-size", "x"], "expected a number of"),
        (["--lora", "no.gguf", "-o", "o.gguf"], "failed to open"),
    ],
)
def test_mistakes_are_one_line_with_the_flag(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's mistakes end with status 2 and name what was typed."""
    with pytest.raises(SystemExit) as ended:
        main(["merge", "base.gguf", *args])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_full_disk_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the machine did is not the user's mistake."""

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loragraph.tools.output.os.pwrite", full)
    with pytest.raises(SystemExit) as ended:
        main(["merge", "base.gguf", "--lora", "a.gguf", "-o", "out.gguf"])
    assert ended.value.code == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("2G", 2 * 10**9), ("500M", 5 * 10**8), ("1.5KiB", 1536), ("3 mb", 3 * 10**6)],
)
def test_sizes(text: str, nbytes: int) -> None:
    """Numbers of bytes with and without units."""
    assert byte_count(text, "--x") == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1i", "nan", "0", "1e9", "9" * 30])
def test_wrong_sizes(text: str) -> None:
    """All else is refused."""
    with pytest.raises(ConfigError, match="--x"):
        byte_count(text, "--x")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("shorten the prompt or raise n_ctx", "shorten the prompt or raise -c"),
        ("load with ignore_norm=True (--ignore-norm) to do so", "load with --ignore-norm to do so"),
        ("load with tied_output=False for that", "load with --no-tied-output for that"),
        ("n_threads: expected an integer", "-t: expected an integer"),
        ("loragraph.adapter.tied_output is no bool", "loragraph.adapter.tied_output is no bool"),
        ("my_n_ctx.gguf and n_ctx.gguf", "my_n_ctx.gguf and n_ctx.gguf"),
        ("use attention='flash'", "use --attention flash"),
    ],
)
def test_messages_name_flags(message: str, shown: str) -> None:
    """Python's arguments become flags, parts of names and paths do not."""
    assert in_flags(message) == shown
