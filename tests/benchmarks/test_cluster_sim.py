"""The simulation of a cluster: nothing is lost, time is accounted for, theory is met."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster_costs import Costs, read_costs
from benchmarks.cluster_load import Arrival, Burst, Shape, arrivals, shares
from benchmarks.cluster_replica import Limits
from benchmarks.cluster_run import Cluster, Outcome
from benchmarks.cluster_sim import COSTS, Simulator, Size, check, everything, markdown
from loragraph.cluster.policy import POLICIES

STEP = 0.01
COSTS_1 = Costs(
    counts=(1, 16),
    base_step_s=(STEP, STEP),
    one_step_s=(STEP, STEP),
    each_step_s=(STEP, STEP),
    base_token_s=0.001,
    adapter_token_s=0.001,
    hit_token_s=0.0,
    request_s=0.0,
    load_s=0.05,
    adapter_bytes=1000,
)
DISK = Limits(link_bytes_per_s=0)
SHAPE = Shape(n_prefix=40, n_own=20, n_tokens=5)


def run(
    trace: list[Arrival],
    n: int = 1,
    policy: str = "random",
    costs: Costs = COSTS_1,
    limits: Limits = DISK,
    shape: Shape = SHAPE,
) -> Outcome:
    """A cold cluster under a trace."""
    return Cluster(n, POLICIES[policy](), costs, limits, shape).run(trace)


def test_one_request_takes_what_its_parts_take() -> None:
    """Load, prompt, a step for each further token; the second one finds adapter and prefix."""
    first, second = run([Arrival(1.0, 0), Arrival(9.0, 0)]).jobs
    assert first.first == pytest.approx(1.0 + 0.05 + 0.06)
    assert first.end == pytest.approx(first.first + 4 * STEP)
    assert second.first == pytest.approx(9.0 + 0.02)
    assert second.end == pytest.approx(second.first + 4 * STEP)


def test_an_arrival_joins_at_the_end_of_the_step_it_falls_into() -> None:
    """The prompt of the second lengthens the next step of the first."""
    first, second = run([Arrival(0.0, -1), Arrival(0.065, -1)]).jobs
    assert first.first == pytest.approx(0.06)
    assert second.first == pytest.approx(0.07 + STEP + 0.02)
    assert first.end == pytest.approx(0.10 + 2 * STEP)


def test_a_request_whose_adapter_is_loading_holds_up_nobody() -> None:
    """The base goes first, though it came later."""
    adapted, base = run([Arrival(0.0, 0), Arrival(0.001, -1)]).jobs
    assert base.first < 0.07
    assert adapted.first > base.first


def test_fetching_takes_the_time_of_the_link() -> None:
    """In front of the load."""
    (job,) = run([Arrival(0.0, 0)], limits=Limits(link_bytes_per_s=1000)).jobs
    assert job.first == pytest.approx(1.0 + 0.05 + 0.06)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [20.0, 300.0])
def test_every_request_ends_exactly_once(policy: str, rate: float) -> None:
    """Overloaded, with fewer slots than adapters and few cells; first token before the end."""
    trace = arrivals(rate, 5.0, 50, 1.0, seed=1)
    limits = Limits(n_slots=2, n_cells=300, link_bytes_per_s=0)
    out = run(trace, 4, policy, limits=limits)
    assert len(out.jobs) == len(trace)
    assert all(job.at < job.first < job.end and job.n_left == 0 for job in out.jobs)
    c = out.counts
    n_adapted = sum(one.adapter >= 0 for one in trace)
    assert c.n_adapter_hits + c.n_adapter_misses == n_adapted
    assert c.n_prefix_hits + c.n_prefix_misses == len(trace)


def test_busy_time_is_the_work_that_was_offered() -> None:
    """One seat, so that nothing is shared: utilisation is rate times service time."""
    costs = replace(COSTS_1, max_sequences=1)
    shape = Shape(n_prefix=1, n_own=20, n_tokens=5)
    out = run(arrivals(10.0, 400.0, 1, 0.0, seed=2, base_share=1.0), costs=costs, shape=shape)
    service = 0.02 + 4 * STEP
    assert out.counts.busy_s == pytest.approx(len(out.jobs) * service, rel=0.001)


def test_waiting_agrees_with_the_queue_of_theory() -> None:
    """M/D/1: one seat and one service time; the mean wait is rho s / (2 (1 - rho))."""
    costs = replace(COSTS_1, max_sequences=1)
    shape = Shape(n_prefix=1, n_own=20, n_tokens=5)
    rate, service = 10.0, 0.02 + 4 * STEP
    limits = Limits(n_cells=10**6, link_bytes_per_s=0)
    out = run(
        arrivals(rate, 600.0, 1, 0.0, seed=3, base_share=1.0),
        costs=costs,
        shape=shape,
        limits=limits,
    )
    waits = [job.first - job.at - 0.02 for job in out.jobs]
    rho = rate * service
    assert float(np.mean(waits)) == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    """To the last bit."""
    trace = arrivals(100.0, 3.0, 20, 1.0, seed=4)
    assert run(trace, 4, policy).row(5) == run(trace, 4, policy).row(5)
    assert trace == arrivals(100.0, 3.0, 20, 1.0, seed=4)
    assert trace != arrivals(100.0, 3.0, 20, 1.0, seed=5)


def test_popularity_is_what_it_says() -> None:
    """Zipf: the first twice as often as the second; flat: all alike; a burst is its adapter's."""
    assert shares(4, 1.0)[0] == pytest.approx(2 * shares(4, 1.0)[1])
    assert shares(4, 0.0).tolist() == [0.25] * 4
    plain = arrivals(50.0, 20.0, 10, 0.0, seed=6)
    extra = arrivals(50.0, 20.0, 10, 0.0, seed=6, burst=Burst(5.0, 6.0, 100.0, 3))
    more = Counter(extra) - Counter(plain)
    assert set(plain) <= set(extra)
    assert {one.adapter for one in more} == {3}
    assert all(5.0 <= one.at < 6.0 for one in more)
    assert [one.at for one in extra] == sorted(one.at for one in extra)


def test_a_step_lies_between_the_measured_ones() -> None:
    """Exact where it was measured; more adapters never take less."""
    costs = replace(
        COSTS_1,
        counts=(1, 2, 4),
        base_step_s=(1.0, 2.0, 3.0),
        one_step_s=(1.5, 3.0, 5.0),
        each_step_s=(1.5, 3.5, 8.0),
    )
    assert costs.step_s(4, 0, 0) == 3.0
    assert costs.step_s(4, 4, 1) == 5.0
    assert costs.step_s(4, 4, 4) == 8.0
    assert costs.step_s(3, 0, 0) == 2.5
    assert costs.step_s(4, 4, 2) == pytest.approx(6.0)
    assert costs.step_s(0, 0, 0) == 0.0


def test_affinity_loads_less_than_random_and_spill_bounds_the_wait() -> None:
    """What the policies are for."""
    trace = arrivals(60.0, 20.0, 200, 1.2, seed=8)
    rows = {
        name: run(trace, 6, name, limits=Limits(n_slots=16, link_bytes_per_s=0)).row(5)
        for name in POLICIES
    }
    ours = rows["affinity with spill"]
    assert ours["loads_per_s"] < 0.8 * rows["random"]["loads_per_s"]
    assert ours["first_p95_s"] < rows["hash"]["first_p95_s"]


def test_all_parts_run_and_make_tables() -> None:
    """In small; each policy and popularity has its row."""
    sim = Simulator(COSTS_1, DISK, SHAPE)
    found = everything(sim, Size(4, 50, 2.0, 4, 40, 2.0, (2.0,), 2.0, 0.5), lambda _: None)
    served = [{"rate": 2.0, "tokens_per_s": 9.0, "first_p50_s": 0.1, "first_p95_s": 0.1}]
    found["check"] = check(COSTS_1, served, SHAPE)
    text = markdown(found)
    assert all(text.count(name) >= 5 for name in POLICIES)
    json.dumps(found)


def test_the_committed_costs_can_be_read() -> None:
    """And hold what the check needs, but no name of a machine."""
    costs, document = read_costs(Path(COSTS))
    assert costs.counts[0] == 1
    assert costs.step_s(8, 8, 8) > costs.step_s(1, 0, 0) > 0
    assert {"date", "machine", "base", "costs", "served"} == document.keys()
