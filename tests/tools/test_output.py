"""Files that reach the disk while they are written: no error is lost, and nothing waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from loragraph.errors import OutputError
from loragraph.tools.output import EarlySync, OutFile, out_files

MUCH = 1 << 30


class SlowFile(OutFile):
    """A file whose sync waits until the test lets it go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.n_syncs = 0
        self.go_on = threading.Event()

    def sync(self) -> None:
        """Waits."""
        self.n_syncs += 1
        assert self.go_on.wait(60)


def test_one_sync_at_a_time_beside_the_work(tmp_path: Path) -> None:
    """Who writes does not wait, and what is written meanwhile is left to the next one."""
    file = SlowFile(tmp_path / "a")
    with EarlySync() as early:
        early.wrote(file, 1)
        assert file.n_syncs == 0
        for _ in range(3):
            early.wrote(file, MUCH)
        file.go_on.set()
    assert file.n_syncs == 1
    file.close()


@pytest.fixture
def _broken_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes nothing."""

    def broken(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("loragraph.tools.output.os.fsync", broken)


def write(file: OutFile, error: Exception | None = None) -> None:
    """Writes with early syncs, and fails."""
    with EarlySync() as early:
        early.wrote(file, MUCH)
        if error is not None:
            raise error


@pytest.mark.usefixtures("_broken_disk")
def test_an_early_error_ends_the_work(tmp_path: Path) -> None:
    """The system tells of a failed write once: to the early sync, whose error must come out."""
    with (
        pytest.raises(OutputError, match="Input/output error"),
        out_files([tmp_path / "a"]) as (file,),
    ):
        write(file)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_broken_disk")
def test_the_error_of_the_work_comes_first(tmp_path: Path) -> None:
    """An early error does not replace what ended the block."""
    with pytest.raises(KeyError), out_files([tmp_path / "a"]) as (file,):
        write(file, KeyError())


def test_a_signal_right_after_the_file_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption before the file's descriptor is known anywhere leaves no file behind."""
    made = os.open

    def interrupted(path: Path, flags: int, mode: int) -> int:
        os.close(made(path, flags, mode))
        raise KeyboardInterrupt

    monkeypatch.setattr("loragraph.tools.output.os.open", interrupted)
    with pytest.raises(KeyboardInterrupt), out_files([tmp_path / "a"]):
        pass
    assert list(tmp_path.iterdir()) == []
