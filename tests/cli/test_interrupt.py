"""Ctrl-C while text is generated: held back to a moment between two tokens."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from loragraph.cli.interrupt import held_interrupt


def interrupt() -> None:
    """Ctrl-C, which Python has handled when this returns."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the handler runs between two bytecodes of the main thread
        pass


@pytest.fixture(autouse=True)
def _default_handler() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_held_until_asked() -> None:
    """The first Ctrl-C raises where the caller asks, not where it arrives."""
    reached = False
    with held_interrupt() as check:
        check()
        interrupt()
        reached = True
        with pytest.raises(KeyboardInterrupt):
            check()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_never_lost() -> None:
    """One that nobody asked for raises at the end of the block."""
    with pytest.raises(KeyboardInterrupt), held_interrupt():
        interrupt()


def test_second_does_not_wait() -> None:
    """Who presses twice does not want to wait for a long prompt."""
    with held_interrupt() as check:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_error_wins() -> None:
    """An error inside is not replaced, and the handler is as before."""

    def fail() -> None:
        with held_interrupt():
            interrupt()
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_stays_ignored() -> None:
    """As under nohup: a process that ignores Ctrl-C goes on doing so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupt() as check:
        interrupt()
        check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_thread() -> None:
    """Outside the main thread, which alone may set handlers, nothing happens."""
    found: list[object] = []

    def use() -> None:
        with held_interrupt() as check:
            check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
