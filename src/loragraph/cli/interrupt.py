"""Ctrl-C at a moment that the command chooses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the given function is called, which raises KeyboardInterrupt then.

    Python raises it between any two bytecodes else, also between the taking of a lock and the
    `try` that gives it back. A second Ctrl-C does not wait. Outside the main thread, where no
    signal arrives, and where the process ignores Ctrl-C, nothing is changed.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield lambda: None
        return
    held = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise KeyboardInterrupt
        held = True

    def check() -> None:
        nonlocal held
        if held:
            held = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
    check()
