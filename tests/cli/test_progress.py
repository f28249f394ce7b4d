"""Bars on standard error: for a terminal alone, a step after the other."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loragraph.cli import doctor as doctor_command
from loragraph.cli import run, serving
from loragraph.cli.main import app
from loragraph.cli.progress import file_progress, step_progress
from loragraph.cli.serve_flags import ServeFlags
from tests.tiny import TinyAdapter, TinyLlama


def terminal(*, is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    """A console and what is printed on it."""
    out = io.StringIO()
    return Console(file=out, force_terminal=is_terminal, width=100, color_system=None), out


def test_each_step_has_its_bar() -> None:
    """The step that runs is named; those that are over are gone from the last picture."""
    console, out = terminal()
    with step_progress(console, quiet=False) as show:
        show("reading", 0, 1)
        show("reading", 1, 1)
        for done in range(4):
            show("measuring", done, 3)
    pictures = out.getvalue()
    assert "measuring" in pictures
    assert pictures.rindex("measuring") > pictures.rfind("reading")


@pytest.mark.parametrize(("is_terminal", "quiet"), [(False, False), (True, True)])
def test_no_bar_where_nobody_looks(is_terminal: bool, quiet: bool) -> None:
    """A log, or a program that reads JSON, gets nothing."""
    console, out = terminal(is_terminal=is_terminal)
    with step_progress(console, quiet=quiet) as show:
        show("measuring", 1, 3)
    assert out.getvalue().strip() == ""


def test_bytes_are_shown_on_a_terminal_alone() -> None:
    """The bar of merge names what it does and how much of it is done."""
    for is_terminal in (True, False):
        console, out = terminal(is_terminal=is_terminal)
        with file_progress(console, "merging") as show:
            show(500_000, 1_000_000)
        assert ("merging" in out.getvalue()) == is_terminal
        assert ("0.5/1.0 MB" in out.getvalue()) == is_terminal


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_doctor_shows_its_steps_on_a_terminal(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar while it computes, none with --json, and standard output the same without."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", model)
    console, out = terminal()
    args = ["doctor", str(base), str(tmp_path / "a.gguf"), *options]
    plain = CliRunner().invoke(app, args)
    assert plain.stderr == ""
    monkeypatch.setattr(doctor_command, "error_console", lambda: console)
    shown = CliRunner().invoke(app, args)
    assert shown.stdout == plain.stdout
    assert ("the text" in out.getvalue()) == (not options)


def assert_shown(pictures: str, *, is_terminal: bool) -> None:
    """A bar that came to its end, on a terminal alone."""
    assert ("loading" in pictures) == is_terminal
    at_the_end = re.search(r"([1-9][\d.]*)/\1 (bytes|[kM]B)", pictures)
    assert (at_the_end is not None) == is_terminal, pictures


def test_run_shows_that_it_loads(tmp_path: Path) -> None:
    """A bar of the base's bytes on a terminal, gone at the end; nothing for a log."""
    base = TinyLlama().write(tmp_path / "base.gguf")
    loading = run._Loading(base, (), False, None, 1, False)
    for is_terminal in (True, False):
        console, out = terminal(is_terminal=is_terminal)
        with run._loaded_model(console, loading):
            pass
        assert_shown(out.getvalue(), is_terminal=is_terminal)


def test_serve_shows_that_it_loads(tmp_path: Path) -> None:
    """The same."""
    base = TinyLlama().write(tmp_path / "base.gguf")
    plan = ServeFlags(base=base, threads=1, repack=False).plan(())
    for is_terminal in (True, False):
        console, out = terminal(is_terminal=is_terminal)
        serving._load_model(console, plan).close()
        assert_shown(out.getvalue(), is_terminal=is_terminal)
