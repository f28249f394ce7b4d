"""Files that reach the disk while they are written: no error is lost, and nothing waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loragraph.errors import OutputError
from loragraph.tools.output import EarlySync, OutFile

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
    file = OutFile(tmp_path / "a")
    with pytest.raises(OutputError, match="Input/output error"):
        write(file)
    file.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_broken_disk")
def test_the_error_of_the_work_comes_first(tmp_path: Path) -> None:
    """An early error does not replace what ended the block."""
    file = OutFile(tmp_path / "a")
    with pytest.raises(KeyError):
        write(file, KeyError())
    file.close()
