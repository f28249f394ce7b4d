"""A simulated cluster: arrivals go through a policy to replicas; events in a heap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster_costs import Costs
from benchmarks.cluster_load import Arrival, Shape
from benchmarks.cluster_replica import Counts, Hooks, Job, Limits, Replica
from loragraph.cluster.fleet import AdapterKey, Fleet, ReplicaView
from loragraph.cluster.policy import Policy, RequestKey


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests, and what the replicas counted."""

    jobs: tuple[Job, ...]
    counts: Counts
    n_replicas: int
    length_s: float
    spread: tuple[tuple[float, int], ...]  # (time, replicas that hold the watched adapter)

    def row(self, n_tokens: int, after: float = 0.0) -> dict[str, float]:
        """The figures of a table; first tokens of requests that came `after` then."""
        firsts = [job.first - job.at for job in self.jobs if job.at >= after]
        c = self.counts
        n_adapter = max(c.n_adapter_hits + c.n_adapter_misses, 1)
        n_prefix = max(c.n_prefix_hits + c.n_prefix_misses, 1)
        return {
            "n_requests": len(self.jobs),
            "adapter_hits": c.n_adapter_hits / n_adapter,
            "prefix_hits": c.n_prefix_hits / n_prefix,
            "loads_per_s": c.n_loads / self.length_s,
            "first_p50_s": float(np.quantile(firsts, 0.5)),
            "first_p95_s": float(np.quantile(firsts, 0.95)),
            "tokens_per_s": len(self.jobs) * n_tokens / self.length_s,
            "busy": c.busy_s / self.length_s / self.n_replicas,
        }


class Cluster:
    """Replicas behind a policy that sees their loads and holdings as they are."""

    def __init__(
        self, n: int, policy: Policy, costs: Costs, limits: Limits, shape: Shape, seed: int = 0
    ) -> None:
        self._policy, self._costs, self._shape, self._seed = policy, costs, shape, seed
        self.fleet = Fleet(ReplicaView(f"replica-{i:04d}") for i in range(n))
        self.replicas = [Replica(costs, limits, shape, self._hooks(i)) for i in range(n)]
        self._version = [0] * n

    def warm(self, adapters: Sequence[int]) -> None:
        """Requests long ago, on idle replicas: what is held then."""
        for k, adapter in enumerate(adapters):
            self.replicas[self._choose(f"warm-{k}", adapter)].warm(adapter)

    def run(self, arrivals: Sequence[Arrival], watch: int = -2) -> Outcome:
        """To the end of the last request."""
        jobs = [Job(k, a.at, a.adapter, self._shape.n_tokens) for k, a in enumerate(arrivals)]
        events: list[tuple[float, int, int, int]] = []  # time, order, replica, version
        spread: list[tuple[float, int]] = []
        order = 0
        k = 0
        end = 0.0
        while k < len(jobs) or events:
            if not events or (k < len(jobs) and jobs[k].at <= events[0][0]):
                now, job = jobs[k].at, jobs[k]
                k += 1
                index = self._choose(f"{self._seed}-{job.number}", job.adapter)
                when = self.replicas[index].arrive(job, now)
                if watch >= 0 and (not spread or now - spread[-1][0] >= 1.0):
                    spread.append((now, self._n_serving(watch)))
            else:
                now, _, index, version = heapq.heappop(events)
                if version != self._version[index]:
                    continue
                ended, when = self.replicas[index].run(now)
                end = max([end, *(job.end for job in ended)])
            self._set_load(index)
            if when is not None:
                self._version[index] += 1
                order += 1
                heapq.heappush(events, (when, order, index, self._version[index]))
        counts = Counts(
            *(sum(getattr(r.counts, f) for r in self.replicas) for f in Counts.__slots__)
        )
        return Outcome(tuple(jobs), counts, len(self.replicas), end, tuple(spread))

    def _choose(self, id_: str, adapter: int) -> int:
        key = frozenset({AdapterKey(str(adapter), 1)}) if adapter >= 0 else frozenset()
        request = RequestKey(id_, key, prefix=str(adapter))
        return int(self._policy.route(request, self.fleet).order[0])

    def _set_load(self, index: int) -> None:
        load = self.replicas[index].n_jobs / self._costs.max_sequences
        self.fleet.set_load(index, load)

    def _n_serving(self, adapter: int) -> int:
        return sum(adapter in replica.users for replica in self.replicas)

    def _hooks(self, index: int) -> Hooks:
        fleet = self.fleet
        return Hooks(
            lambda a: fleet.hold(index, AdapterKey(str(a), 1)),
            lambda a: fleet.release(index, AdapterKey(str(a), 1)),
            lambda a: fleet.learn_prefix(index, str(a)),
            lambda a: fleet.forget_prefix(index, str(a)),
        )
