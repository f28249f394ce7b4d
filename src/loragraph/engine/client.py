"""Sends requests to the engine's thread and waits for what comes back; on any caller's thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Sequence

from loragraph.engine.core import EngineCore
from loragraph.engine.handle import EngineStream, outcome_of
from loragraph.engine.job import Job
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.request import Event, Outcome, Request, Result, Score
from loragraph.engine.thread import EngineThread
from loragraph.errors import LifecycleError

_Outcomes = queue.SimpleQueue[Outcome]


class Client:
    """Whoever stops waiting, for whatever reason, cancels what he waited for."""

    def __init__(self, jobs: JobMaker, core: EngineCore, thread: EngineThread) -> None:
        self._jobs = jobs
        self._core = core
        self._thread = thread

    def run_all(self, requests: Sequence[Request]) -> list[Result]:
        """All results in order; what is wrong with one raises before any is submitted."""
        submitted = self._make_all(requests)
        self._post([job for job, _ in submitted])
        results: list[Result] = []
        try:
            for _, outcomes in submitted:
                outcome = outcome_of(outcomes.get())
                assert isinstance(outcome, Result)
                results.append(outcome)
        except BaseException:  # an interrupt too
            for job, _ in submitted:
                self._cancel(job)
            raise
        return results

    def open(self, request: Request) -> EngineStream:
        """A stream of a request's events."""
        outcomes: _Outcomes = queue.SimpleQueue()
        job = self._jobs.make(request, outcomes.put, wants_events=True)
        self._post([job])
        return EngineStream(outcomes, lambda: self._cancel(job))

    def score(self, request: Request, start: int) -> Score:
        """Log-probabilities of the prompt's tokens from `start` on."""
        outcomes: _Outcomes = queue.SimpleQueue()
        job = self._jobs.make(request, outcomes.put, score_from=start)
        self._post([job])
        try:
            outcome = outcome_of(outcomes.get())
        except BaseException:  # an interrupt too
            self._cancel(job)
            raise
        assert isinstance(outcome, Score)
        return outcome

    async def outcomes(
        self, request: Request, *, events: bool
    ) -> AsyncGenerator[Event | Result | Score, None]:
        """What a request sends out, for asyncio."""
        loop = asyncio.get_running_loop()
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

        def sink(outcome: Outcome) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(outcomes.put_nowait, outcome)

        job = await asyncio.to_thread(self._jobs.make, request, sink, wants_events=events)
        self._post([job])
        try:
            while True:
                outcome = outcome_of(await outcomes.get())
                yield outcome
                if not isinstance(outcome, Event):
                    return
        finally:
            self._cancel(job)

    def _make_all(self, requests: Sequence[Request]) -> list[tuple[Job, _Outcomes]]:
        made: list[tuple[Job, _Outcomes]] = []
        try:
            for request in requests:
                outcomes: _Outcomes = queue.SimpleQueue()
                made.append((self._jobs.make(request, outcomes.put), outcomes))
        except BaseException:
            for job, _ in made:
                job.close()
            raise
        return made

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
