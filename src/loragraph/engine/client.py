"""Sends requests to the engine's thread and waits for what comes back; on any caller's thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from functools import partial

from loragraph.engine.async_stream import AsyncStream, Deliveries, Mailbox
from loragraph.engine.core import EngineCore
from loragraph.engine.handle import EngineStream, outcome_of
from loragraph.engine.job import Job, Sink
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.request import Answer, Event, Outcome, Request, Result
from loragraph.engine.thread import EngineThread
from loragraph.errors import LifecycleError

_Outcomes = queue.SimpleQueue[Outcome]
Make = Callable[[Sink], Job]
"""Makes a job for a sink; may take long, and is called where nobody waits for the thread."""


class Client:
    """Whoever stops waiting, for whatever reason, cancels what he waited for."""

    def __init__(
        self, jobs: JobMaker, core: EngineCore, thread: EngineThread, deliveries: Deliveries
    ) -> None:
        """`deliveries` are flushed by the thread."""
        self._jobs = jobs
        self._core = core
        self._thread = thread
        self._deliveries = deliveries

    def run_all(self, requests: Sequence[Request]) -> list[Result]:
        """All results in order; what is wrong with one raises before any is submitted."""
        makes = [partial(self._jobs.make, request) for request in requests]
        return [_result(answer) for answer in self.answers(makes)]

    def answers(self, makes: Sequence[Make]) -> list[Answer]:
        """What each job ends with, in order; what is wrong with one raises before any is submitted.

        The first error ends the others.
        """
        submitted = _make_all(makes)
        self._post([job for job, _ in submitted])
        answers: list[Answer] = []
        try:
            for _, outcomes in submitted:
                outcome = outcome_of(outcomes.get())
                assert not isinstance(outcome, Event)
                answers.append(outcome)
        except BaseException:  # an interrupt too
            for job, _ in submitted:
                self._cancel(job)
            raise
        return answers

    def open(self, request: Request) -> EngineStream:
        """A stream of a request's events."""
        outcomes: _Outcomes = queue.SimpleQueue()
        job = self._jobs.make(request, outcomes.put, wants_events=True)
        self._post([job])
        return EngineStream(outcomes, lambda: self._cancel(job))

    async def submit(self, make: Make) -> AsyncStream:
        """A stream for the running event loop, which is never blocked."""
        loop = asyncio.get_running_loop()
        mailbox = Mailbox()
        making = loop.run_in_executor(None, make, self._deliveries.sink(loop, mailbox))
        try:
            job = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_made)  # its thread cannot be stopped
            raise
        self._post([job])
        return AsyncStream(job.number, job.tokens, mailbox, lambda: self._cancel(job))

    async def answer(self, make: Make) -> Answer:
        """What a job ends with, for asyncio."""
        async with await self.submit(make) as stream:
            return await stream.answer()

    def _post(self, jobs: Sequence[Job]) -> None:
        """They enter together."""

        def command() -> None:
            for job in jobs:
                self._core.submit(job)

        try:
            self._thread.post(command)
        except LifecycleError:
            for job in jobs:
                job.close()
            raise

    def _cancel(self, job: Job) -> None:
        if job.ended:
            return
        try:
            self._thread.post(lambda: self._core.abort(job))
        except LifecycleError:
            return  # closed: every job has ended


def _close_made(made: asyncio.Future[Job]) -> None:
    """Frees a job that nobody waits for any more."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _make_all(makes: Sequence[Make]) -> list[tuple[Job, _Outcomes]]:
    made: list[tuple[Job, _Outcomes]] = []
    try:
        for make in makes:
            outcomes: _Outcomes = queue.SimpleQueue()
            made.append((make(outcomes.put), outcomes))
    except BaseException:
        for job, _ in made:
            job.close()
        raise
    return made


def _result(answer: Answer) -> Result:
    assert isinstance(answer, Result)
    return answer
