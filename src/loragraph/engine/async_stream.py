"""The caller's end of a request in asyncio, and how outcomes get there from the engine's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self, cast

from loragraph.engine.job import Sink
from loragraph.engine.request import Answer, Event, Outcome, Result
from loragraph.errors import LifecycleError, LoragraphError


class Mailbox:
    """Outcomes of one request that its reader has not taken yet. On the event loop's thread."""

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Adds outcomes, and wakes the reader."""
        self._outcomes.extend(outcomes)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Outcome]:
        """All there are, in order, at least one."""
        while not self._outcomes:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._outcomes = self._outcomes, []
        return taken


class Deliveries:
    """Outcomes on their way to event loops. On the engine's thread.

    They leave together, with one wake-up a loop, however many streams it reads.
    """

    def __init__(self) -> None:
        self._pending: dict[asyncio.AbstractEventLoop, dict[Mailbox, list[Outcome]]] = {}

    def sink(self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox) -> Sink:
        """What a job sends its outcomes to."""

        def sink(outcome: Outcome) -> None:
            self._pending.setdefault(loop, {}).setdefault(mailbox, []).append(outcome)

        return sink

    def flush(self) -> None:
        """Sends what was collected."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        for loop, boxes in pending.items():
            try:
                loop.call_soon_threadsafe(_deliver, boxes)
            except RuntimeError:  # the loop was closed: nobody reads any more
                continue


def _deliver(boxes: dict[Mailbox, list[Outcome]]) -> None:
    for mailbox, outcomes in boxes.items():
        mailbox.put(outcomes)


class AsyncStream:
    """The events of one request; made by `Engine.asubmit`, read by one task.

    `async for event in stream` gives them one by one, `async for events in stream.batches()` all
    that are there at once. Leaving its `async with`, closing it, or cancelling the task that reads
    it cancels the request; leaving the loop alone does not. `result` is there after the last event.
    """

    def __init__(
        self,
        number: int,
        prompt_tokens: Sequence[int],
        mailbox: Mailbox,
        cancel: Callable[[], None],
    ) -> None:
        self.number = number  # the request's, as in `Engine.sequences`
        self.prompt_tokens = tuple(prompt_tokens)
        self._mailbox = mailbox
        self._cancel = cancel
        self._unread: deque[Event] = deque()
        self._answer: Answer | None = None
        self._error: LoragraphError | None = None
        self._ended = False

    @property
    def result(self) -> Result:
        """What was generated; LifecycleError before the end, the error that ended the request."""
        answer = self._known_answer()
        assert isinstance(answer, Result)
        return answer

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Lists of events, none empty; raises what ended the request, after its last events."""
        while events := await self.batch():
            yield events

    async def batch(self) -> list[Event]:
        """One of batches(); empty after the last."""
        if self._unread:
            events = list(self._unread)
            self._unread.clear()
            return events
        while not self._ended:
            try:
                outcomes = await self._mailbox.take()
            except BaseException:  # the task was cancelled
                self.close()
                raise
            events = self._noted(outcomes)
            if events:
                return events
        if self._error is not None:
            raise self._error
        return []

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.batch():
            self._unread.extend(events)  # whoever stops between two of them finds the others
            while self._unread:
                yield self._unread.popleft()

    async def wait(self) -> Result:
        """Reads all events there are to come, and gives the result."""
        await self.answer()
        return self.result

    async def answer(self) -> Answer:
        """wait(), for scores and embeddings too."""
        async for _ in self.batches():
            pass
        return self._known_answer()

    def stop(self) -> None:
        """Ends the generation early; its last events and the result ("abort") are still to come."""
        if not self._ended:
            self._cancel()

    def close(self) -> None:
        """Cancels the request if it runs; never blocks; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._cancel()

    def _noted(self, outcomes: list[Outcome]) -> list[Event]:
        """The events among them; nothing comes after what is no event."""
        last = outcomes[-1]
        if not isinstance(last, Event):
            outcomes.pop()
            self._ended = True
            if isinstance(last, LoragraphError):
                self._error = last
            else:
                self._answer = last
        return cast(list[Event], outcomes)

    def _known_answer(self) -> Answer:
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise LifecycleError(
                "the result of a stream was asked for before its end", hint="read all events first"
            )
        return self._answer

    async def aclose(self) -> None:
        """close(), for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()
