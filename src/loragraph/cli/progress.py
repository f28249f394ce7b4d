"""Progress of work on files, on standard error of a terminal; and signals that end it in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def error_console() -> Console:
    """Standard error, with text printed as it is."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def file_progress(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that takes (bytes done, bytes in all) and shows a bar, bytes/s and time left."""
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # Only for a terminal: a log needs no bar.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def ends_in_order() -> Iterator[None]:
    """SIGTERM ends the block by an exception, as Ctrl-C does: unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signal_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
