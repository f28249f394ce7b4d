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
    TimeElapsedColumn,
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
def step_progress(console: Console, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function that takes (step, done, in all) and shows the step, a bar and its time."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:

        def show(step: str, done: int, total: int) -> None:
            if not bar.tasks or bar.tasks[0].description != step:
                for task_id in bar.task_ids:
                    bar.remove_task(task_id)
                # One part would stand at nothing until it jumps: without a total the bar pulses.
                bar.add_task(step, total=total if total > 1 else None)
            bar.update(bar.task_ids[0], completed=done)

        yield show


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
