"""The engine without its thread: what is asked of it, and one step after another.

    admit -> schedule -> run -> sample -> update

One thread uses it. It knows neither queues nor files: loads are started through a callback and
reported back, results leave through the sinks of the jobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.engine.batching import batch_of
from loragraph.engine.counters import CoreStats
from loragraph.engine.holds import Hold, Holds
from loragraph.engine.invocation import active_from, segments_of
from loragraph.engine.job import Job
from loragraph.engine.outputs import StepOutputs
from loragraph.engine.parts import StepRunner, TokenTexts
from loragraph.engine.passes import RunCalls
from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.pool import Grant
from loragraph.engine.registry import Generation
from loragraph.engine.request import AdapterUse
from loragraph.engine.residency import Residency
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.seats import Seats
from loragraph.engine.sequence import Sequence
from loragraph.engine.sequence_table import SequenceRow, sequence_row
from loragraph.engine.waiting import WaitingJobs
from loragraph.errors import (
    CapacityError,
    DeadlineError,
    LoragraphError,
)
from loragraph.kernels.sampling import run_alone


class EngineCore:
    """Scheduler, residency and samplers around one runner."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: StepRunner,
        texts: TokenTexts,
        residency: Residency,
        clock: Callable[[], float],
        max_waiting: int = 1024,
        check_files: Callable[[], None] = lambda: None,
        run_calls: RunCalls = run_alone,
    ) -> None:
        """`check_files` raises, before a step, where the mapped model cannot be read any more.

        `run_calls` runs what sampling asks of the rows of logits.
        """
        self.scheduler = Scheduler(config)
        self.residency = residency
        self.holds = Holds(residency)
        self.waiting = WaitingJobs(max_waiting, max_overtaken=2 * config.max_sequences)
        self.stats = CoreStats()
        self._runner = runner
        self._clock = clock
        self._check_files = check_files
        residency.is_awaited = self._is_awaited
        self._loading: dict[Job, None] = {}  # hold places in the pool, in part still loading
        self._running: dict[Job, None] = {}  # in the scheduler
        self._closed: LoragraphError | None = None
        self._ids = itertools.count()
        self.seats = Seats(config.max_sequences)
        self.outputs = StepOutputs(self.scheduler, texts, self.stats, clock, run_calls)

    @property
    def jobs(self) -> Iterator[Job]:
        """Every job that has not ended."""
        yield from self.waiting
        yield from self._loading
        yield from self._running

    @property
    def n_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self.waiting) + len(self._loading) + len(self._running)

    def count(self) -> CoreStats:
        """A copy of the counters, with the jobs of now."""
        return replace(
            self.stats,
            n_jobs=self.n_jobs,
            n_jobs_waiting=len(self.waiting),
            n_jobs_loading=len(self._loading),
            n_jobs_running=len(self._running),
        )

    def sequences(self) -> Iterator[SequenceRow]:
        """What is known of every choice that has not ended."""
        now = self._clock()
        for job in self.jobs:
            for choice in job.choices:
                if choice.finish_reason is None:
                    seat = self.seats.of(choice.sequence)
                    yield sequence_row(choice, seat, now, loading=job in self._loading)

    def submit(self, job: Job) -> None:
        """Takes a job in; what is wrong goes to its sink."""
        self.stats.n_submitted += 1
        job.submitted = self._clock()
        try:
            if self._closed is not None:
                raise self._closed
            self.residency.pool.check(job.wanted)
            self.waiting.add(job)
        except LoragraphError as error:
            self._end(job, error)

    def abort(self, job: Job) -> None:
        """Ends a job in any state; its sink gets what there is, as "abort"."""
        if not job.ended:
            self.stats.n_aborted += 1
            self._leave(job)
            self._end(job, None)

    def on_load(self, generation: Generation, outcome: Adapter | LoragraphError) -> None:
        """A load ended."""
        failed = self.residency.on_load(generation, outcome)
        if failed:
            error = self.residency.pool.error_of(generation)
            for ticket in failed:
                if isinstance(ticket, Job):
                    self._fail(ticket, error)
                elif isinstance(ticket, Hold):
                    self.holds.fail(ticket, error)
        self.holds.on_load()
        for job in [job for job in self._loading if self.residency.pool.ready(job)]:
            del self._loading[job]
            self._start(job)

    def next_deadline(self) -> float:
        """On the clock; infinity where no job has one."""
        return min(
            (job.deadline for job in self.jobs if job.deadline is not None), default=math.inf
        )

    def step(self) -> bool:
        """One step; False where there was nothing to compute."""
        self._expire()
        self._admit()
        self.residency.sync()
        plan = self.scheduler.schedule()
        running = set(self.scheduler.running)
        self.seats.keep(running)  # first: who was admitted may need a seat of these
        for sequence in plan.admitted:
            if sequence in running:  # not preempted again at once
                self.seats.take(sequence)
        if not plan.chunks:
            return bool(plan.preempted)
        try:
            self._check_files()
            logits = self._runner.run(batch_of(plan), copy=False)
        except (LoragraphError, MemoryError) as error:
            self._step_failed(error)
            return True
        self.stats.n_steps += 1
        self.stats.n_step_sequences += len(plan.chunks)
        self.scheduler.complete(plan)
        ended = self.outputs.update(plan, logits, self._runner.states)
        for job in ended.done:
            self._finish(job)
        for job, failure in ended.failed.items():
            self._fail(job, failure)
        if ended.spoiled:
            self._drop_unused_cells()
        return True

    def hold(self, hold: Hold) -> None:
        """See Holds.hold."""
        if self._closed is not None:
            hold.done(self._closed)
        else:
            self.holds.hold(hold)

    def retire(self, generation: Generation) -> None:
        """The generation's name means something else now: it goes once nobody uses it."""
        self.holds.unpin(generation)
        self.residency.retire(generation)

    def close(self, error: LoragraphError) -> None:
        """Ends every job, and every job to come, with an error."""
        self._closed = error
        for job in list(self.jobs):
            self._fail(job, error)
        self.holds.close(error)

    def _expire(self) -> None:
        now = self._clock()
        if self.next_deadline() > now:
            return
        for job in [one for one in self.jobs if one.deadline is not None and one.deadline <= now]:
            self._leave(job)
            late = DeadlineError(
                f"the request's time was over after {now - job.submitted:.3g} s",
                result=job.answer(now),
            )
            self._end(job, late)

    def _admit(self) -> None:
        for job, answer in self.waiting.serve(self._has_seat, self._acquire):
            if isinstance(answer, LoragraphError):
                self._fail(job, answer)
            elif answer is Grant.LOADING:
                self._loading[job] = None
            else:
                self._start(job)

    def _has_seat(self) -> bool:
        scheduler, seats = self.scheduler, self.scheduler.config.max_sequences
        return len(scheduler.running) + scheduler.n_waiting < seats

    def _acquire(self, job: Job) -> Grant | None:
        if not job.scales:
            return Grant.READY
        full = len(self._loading) >= self.scheduler.config.max_sequences
        if full and not self.residency.has(job.scales):
            return None
        return self.residency.acquire(job, job.scales)

    def _start(self, job: Job) -> None:
        """Gives a job, whose adapters are in memory, to the scheduler."""
        try:
            sequences = self._sequences(job)
            self.scheduler.add(*sequences)
        except LoragraphError as error:
            self._fail(job, error)
            return
        job.started = self._clock()
        self._running[job] = None
        for choice, sequence in zip(job.choices, sequences, strict=True):
            choice.sequence = sequence
            self.outputs.choices[sequence] = choice

    def _sequences(self, job: Job) -> list[Sequence]:
        adapters = self.residency.adapters
        scaled, uses = [], []
        for generation, scale in job.scales.items():
            adapter = adapters[generation]
            start = active_from(adapter, job.tokens)
            scaled.append((adapter, scale, start))
            use = AdapterUse(generation.name, generation.number, adapter.digest, scale, start)
            uses.append(use)
        job.uses = tuple(uses)
        segments = segments_of(scaled)
        for segment in segments:
            self.residency.check(segment.mix)
        return [
            Sequence(
                next(self._ids),
                list(job.tokens),
                len(job.tokens),
                segments,
                job.max_tokens,
                salt=job.salt,
                logits_from=None if choice.index else job.results_from,
                gives_states=job.states is not None,
            )
            for choice in job.choices
        ]

    def _drop_unused_cells(self) -> None:
        """After values that are not finite: no masked cell may hold one, since 0 * NaN is NaN."""
        self.scheduler.tree.clear()
        free = set(range(self.scheduler.config.n_cells)) - self.scheduler.blocks.used_cells()
        self._runner.zero_cells(np.array(sorted(free), np.int64))

    def _step_failed(self, cause: LoragraphError | MemoryError) -> None:
        """Nobody knows which cells were written: all running jobs end, all cells are forgotten."""
        error = (
            cause if isinstance(cause, LoragraphError) else CapacityError("no memory for a step")
        )
        self.stats.n_step_failures += 1
        for job in {self.outputs.choices[one].job: None for one in self.scheduler.fail()}:
            self._fail(job, error)
        self._drop_unused_cells()

    def _fail(self, job: Job, error: LoragraphError) -> None:
        if not job.ended:
            self._leave(job)
            self._end(job, error)

    def _finish(self, job: Job) -> None:
        self._leave(job)
        self._end(job, None)

    def _leave(self, job: Job) -> None:
        """Takes a job out of wherever it is; everything it held is free afterwards."""
        self.waiting.remove(job)
        self._loading.pop(job, None)
        self._running.pop(job, None)
        for sequence in job.sequences:
            self.scheduler.finish(sequence, "abort")
            self.seats.leave(sequence)
        self.outputs.drop(job.sequences)
        self.residency.pool.release(job)
        for generation in job.scales:
            if generation.retired and generation.owned:
                self.residency.retire(generation)
        job.close()

    def _is_awaited(self, generation: Generation) -> bool:
        return any(generation in job.scales for job in self.waiting)

    def _end(self, job: Job, error: LoragraphError | None) -> None:
        """The job's last word."""
        job.ended = True
        job.close()
        if error is not None:
            self.stats.n_failed += 1
            job.sink(error)
        else:
            self.stats.n_finished += 1
            job.sink(job.answer(self._clock()))
