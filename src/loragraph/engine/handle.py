"""The caller's end of a request: outcomes from the engine's thread, read by one other thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Self

from loragraph.engine.request import Answer, Event, Outcome, Result
from loragraph.errors import LifecycleError, LoragraphError


def outcome_of(outcome: Outcome) -> Event | Answer:
    """The outcome, raised where it is an error.

    One error may end several requests, so each is raised as it is, without being changed.
    """
    if isinstance(outcome, LoragraphError):
        raise outcome
    return outcome


class EngineStream:
    """Iterator over the events of one request; made by `Engine.stream`.

    Leaving or closing it cancels the request. `result` is there once it is exhausted.
    """

    def __init__(self, outcomes: queue.SimpleQueue[Outcome], cancel: Callable[[], None]) -> None:
        self._outcomes = outcomes
        self._cancel = cancel
        self._result: Result | None = None
        self._ended = False

    @property
    def result(self) -> Result:
        """What was generated; LifecycleError before the end."""
        if self._result is None:
            raise LifecycleError(
                "the result of a stream was asked for before its end", hint="read all events first"
            )
        return self._result

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        try:
            outcome = outcome_of(self._outcomes.get())
        except BaseException:  # an interrupt too
            self.close()
            raise
        if isinstance(outcome, Event):
            return outcome
        assert isinstance(outcome, Result)
        self._result, self._ended = outcome, True
        raise StopIteration

    def close(self) -> None:
        """Cancels the request if it runs; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
