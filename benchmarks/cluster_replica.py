"""One simulated replica: seats, steps, adapters in slots, prefixes in cells. Knows no clock.

A step computes one token of each running sequence, and prompts up to the engine's budget. Between
two changes of what runs all steps are alike, so they are taken at once; an arrival cuts them at
the end of the step that it falls into.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.cluster_costs import Costs
from benchmarks.cluster_load import Shape


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way."""

    number: int
    at: float
    adapter: int
    n_left: int  # tokens to generate
    n_prompt: int = 0  # tokens to compute
    n_hit: int = 0
    first: float = -1.0
    end: float = -1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each replica."""

    n_slots: int = 64
    n_cells: int = 8192
    max_batch_tokens: int = 512
    link_bytes_per_s: float = 125e6  # from where adapters are fetched; 0: they are on disk


@dataclass(slots=True)
class Counts:
    """What happened."""

    n_adapter_hits: int = 0
    n_adapter_misses: int = 0
    n_loads: int = 0
    n_prefix_hits: int = 0
    n_prefix_misses: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Hooks:
    """Whom a replica tells what it holds: the router's fleet."""

    hold: Callable[[int], None]
    release: Callable[[int], None]
    learn: Callable[[int], None]
    forget: Callable[[int], None]


@dataclass(slots=True)
class Replica:
    """State at `now`, the time of its last event; `next_event` says when it wants to be run."""

    costs: Costs
    limits: Limits
    shape: Shape
    hooks: Hooks
    counts: Counts = field(default_factory=Counts)
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    prefilling: list[Job] = field(default_factory=list)
    slots: OrderedDict[int, float] = field(default_factory=OrderedDict)  # adapter: there from
    users: dict[int, int] = field(default_factory=dict)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    loader_free: float = 0.0
    step_start: float = 0.0
    step_s: float = 0.0  # 0: nothing runs
    n_steps: int = 0
    step_tokens: list[tuple[Job, int]] = field(default_factory=list)  # of prompts, in this step

    @property
    def n_jobs(self) -> int:
        """Running and queued."""
        return len(self.waiting) + len(self.running) + len(self.prefilling)

    def arrive(self, job: Job, now: float) -> float | None:
        """A request comes; the time of the next event if it is another one now."""
        self._want(job.adapter, now)
        self.waiting.append(job)
        if not self.step_s:
            return self._start(now)
        if self.n_steps > 1 and self._has_seat():
            done = max(math.ceil((now - self.step_start) / self.step_s), 1)
            if done < self.n_steps:
                self.n_steps = done
                return self.step_start + done * self.step_s
        return None

    def run(self, now: float) -> tuple[list[Job], float | None]:
        """The steps that end now: the requests that end with them, and the next event."""
        ended: list[Job] = []
        if self.step_s:
            self.counts.busy_s += self.n_steps * self.step_s
            for job in self.running:
                job.n_left -= self.n_steps
            for job, n in self.step_tokens:
                job.n_prompt -= n
                if job.n_prompt <= 0:
                    self.prefilling.remove(job)
                    job.first = now
                    job.n_left -= 1
                    self.running.append(job)
            for job in [one for one in self.running if one.n_left <= 0]:
                self.running.remove(job)
                job.end = now
                self._leave(job.adapter)
                ended.append(job)
        return ended, self._start(now)

    def warm(self, adapter: int) -> None:
        """As if a request had come and gone long ago."""
        if adapter >= 0:
            if adapter in self.slots:
                self.slots.move_to_end(adapter)
            elif self._make_slot():
                self.slots[adapter] = 0.0
                self.hooks.hold(adapter)
        self._remember(adapter)

    def _has_seat(self) -> bool:
        return len(self.running) + len(self.prefilling) < self.costs.max_sequences

    def _start(self, now: float) -> float | None:
        """Begins the next steps; when they end, or when to look again; None: when one comes."""
        self._admit(now)
        self.step_s, self.step_tokens = 0.0, []
        if not self.running and not self.prefilling:
            times = [self.slots[j.adapter] for j in self.waiting if j.adapter in self.slots]
            return max(min(times), now) if times else None
        self.step_start = now
        budget = self.limits.max_batch_tokens - len(self.running)
        extra = 0.0
        for job in self.prefilling:
            n = min(job.n_prompt, budget)
            if n <= 0:
                break
            budget -= n
            self.step_tokens.append((job, n))
            per = self.costs.base_token_s if job.adapter < 0 else self.costs.adapter_token_s
            extra += n * per
            if n == job.n_prompt:
                extra += self.costs.request_s + job.n_hit * self.costs.hit_token_s
        adapted = [job.adapter for job in self.running if job.adapter >= 0]
        n_adapters = len(set(adapted))
        self.step_s = self.costs.step_s(len(self.running), len(adapted), n_adapters) + extra
        self.n_steps = 1 if self.step_tokens else min(job.n_left for job in self.running)
        if not self.step_tokens and self.waiting and self._has_seat():
            ready = [self.slots[j.adapter] for j in self.waiting if j.adapter in self.slots]
            if ready:  # one is loading: look when it is there
                until = math.ceil((min(ready) - now) / self.step_s)
                self.n_steps = max(min(self.n_steps, until), 1)
        return now + self.n_steps * self.step_s

    def _admit(self, now: float) -> None:
        """Those whose adapters are there get seats, in their order; others do not hold them up."""
        for job in list(self.waiting):
            if not self._has_seat():
                return
            if job.adapter >= 0:
                if job.adapter not in self.slots:
                    self._load(job.adapter, now)
                if self.slots.get(job.adapter, math.inf) > now:
                    continue
            self.waiting.remove(job)
            hit = job.adapter in self.prefixes
            self.counts.n_prefix_hits += hit
            self.counts.n_prefix_misses += not hit
            job.n_hit = self.shape.n_prefix if hit else 0
            job.n_prompt = self.shape.n_own + self.shape.n_prefix - job.n_hit
            self._remember(job.adapter)
            self.prefilling.append(job)

    def _want(self, adapter: int, now: float) -> None:
        if adapter < 0:
            return
        self.users[adapter] = self.users.get(adapter, 0) + 1
        if adapter in self.slots:
            self.slots.move_to_end(adapter)
            self.counts.n_adapter_hits += 1
        else:
            self.counts.n_adapter_misses += 1
            self._load(adapter, now)

    def _load(self, adapter: int, now: float) -> None:
        """One worker loads; where all slots are in use nothing happens yet."""
        if not self._make_slot():
            return
        link = self.limits.link_bytes_per_s
        fetch_s = self.costs.adapter_bytes / link if link else 0.0
        self.loader_free = max(self.loader_free, now) + fetch_s + self.costs.load_s
        self.slots[adapter] = self.loader_free
        self.counts.n_loads += 1
        self.hooks.hold(adapter)

    def _make_slot(self) -> bool:
        if len(self.slots) < self.limits.n_slots:
            return True
        for adapter in self.slots:
            if adapter not in self.users:
                del self.slots[adapter]
                self.hooks.release(adapter)
                return True
        return False

    def _leave(self, adapter: int) -> None:
        if adapter >= 0:
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]

    def _remember(self, adapter: int) -> None:
        """The prefix's cells, least recently used first out; running sequences need theirs."""
        if adapter not in self.prefixes:
            self.hooks.learn(adapter)
        self.prefixes[adapter] = None
        self.prefixes.move_to_end(adapter)
        own = self.shape.n_own + self.shape.n_tokens
        free = self.limits.n_cells - own * (len(self.running) + len(self.prefilling))
        while len(self.prefixes) > max(free // self.shape.n_prefix, 1):
            gone, _ = self.prefixes.popitem(last=False)
            self.hooks.forget(gone)
