"""Requests that wait for a seat or for room for their adapters. Pure.

**Fairness.** A flow is a set of adapters. Flows stand in a queue; one that is served goes to its
end, a new one joins there, one that cannot be served now keeps its place. So with F flows waiting a
flow's first request is served after at most F - 1 requests of other flows, unless it lacks room for
its adapters, or would have to load some while as many requests as there are seats wait for loads:
then it is passed over until one of those has ended. The first flow that lacks room is the head:
others may overtake it, but requests that hold adapters at most `max_overtaken` times, then none
until the head is served. So what holds the room runs out, however many requests for it wait, and a
flow that lacks room is served after at most (F - 1) + F * max_overtaken requests with adapters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

from loragraph.engine.job import Job
from loragraph.engine.pool import Grant
from loragraph.errors import LoragraphError, OverloadedError

Acquire = Callable[[Job], Grant | None]
"""Asks for a job's adapters; None: they cannot be loaded now."""

_MAX_BLOCKED = 16
"""After so many flows without room, others with adapters are not asked in this step."""


class WaitingJobs:
    """Jobs by flow, in turn."""

    def __init__(self, max_waiting: int, max_overtaken: int) -> None:
        self.max_waiting = max_waiting
        self.max_overtaken = max_overtaken
        self._flows: dict[Hashable, deque[Job]] = {}
        self._n = 0
        self._head: Job | None = None  # first in turn of those that lack room
        self._n_overtaken = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Job]:
        for flow in self._flows.values():
            yield from flow

    def add(self, job: Job) -> None:
        """OverloadedError where too many wait."""
        if self._n >= self.max_waiting:
            raise OverloadedError(
                f"{self._n} requests wait already (at most {self.max_waiting})",
                hint="try again later",
            )
        self._flows.setdefault(job.flow, deque()).append(job)
        self._n += 1

    def remove(self, job: Job) -> bool:
        """Takes a job out; False where it does not wait."""
        flow = self._flows.get(job.flow)
        if flow is None or job not in flow:
            return False
        flow.remove(job)
        self._n -= 1
        if not flow:
            del self._flows[job.flow]
        if job is self._head:
            self._head = None
        return True

    def serve(
        self, has_seat: Callable[[], bool], acquire: Acquire
    ) -> Iterator[tuple[Job, Grant | LoragraphError]]:
        """Takes out, in turn, the jobs that can be served, with the grant or what forbids it."""
        turns = deque(self._flows)
        n_blocked = 0  # flows further ahead that lack room
        while turns and has_seat():
            flow = turns.popleft()
            job = self._flows[flow][0]
            closed = n_blocked and (
                self._n_overtaken >= self.max_overtaken or n_blocked >= _MAX_BLOCKED
            )
            if closed and job.scales:
                continue
            answer: Grant | LoragraphError | None
            try:
                answer = acquire(job)
            except LoragraphError as error:
                answer = error
            if answer is None:
                continue
            if answer is Grant.BLOCKED:
                if not n_blocked and self._head is not job:
                    self._head, self._n_overtaken = job, 0
                n_blocked += 1
                continue
            if n_blocked and job.scales:
                self._n_overtaken += 1
            self.remove(job)
            rest = self._flows.pop(flow, None)
            if rest is not None:  # served: behind the others
                self._flows[flow] = rest
                turns.append(flow)
            yield job, answer
