"""A limit of time on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loragraph.engine.request import Event, Request
from loragraph.server.llamacpp.timed import TimedRun


class Stream:
    """Counts how often it is stopped."""

    def __init__(self) -> None:
        self.n_stops = 0

    def stop(self) -> None:
        """As AsyncStream.stop."""
        self.n_stops += 1


def stops(monkeypatch: pytest.MonkeyPatch, *pieces: tuple[float, str]) -> list[bool]:
    """Whether a run with a limit of one second has stopped behind each piece, at these seconds."""
    unused = cast(Any, None)
    run = TimedRun(unused, Request("a"), unused, "id", "completion", seconds=1.0)
    stream = Stream()
    run.stream = cast(Any, stream)
    found = []
    for now, piece in pieces:
        clock = SimpleNamespace(monotonic=lambda now=now: now)
        monkeypatch.setattr("loragraph.server.runs.time", clock)
        run._note([Event(0, piece, 5)])
        found.append(stream.n_stops > 0)
    return found


def test_it_goes_on_behind_a_line_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the first token; its end is the first event at or behind the limit."""
    pieces = [(100.0, "a"), (100.1, "\n"), (100.9, "b"), (101.0, "b")]

    assert stops(monkeypatch, *pieces) == [False, False, False, True]


def test_it_waits_for_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is; the line break may be what ends it."""
    pieces = [(0.0, "a"), (5.0, "b"), (9.0, "b\n")]

    assert stops(monkeypatch, *pieces) == [False, False, True]
