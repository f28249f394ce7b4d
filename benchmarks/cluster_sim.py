"""scripts/bench cluster-sim: many replicas simulated from the costs of one, policies compared.

--measure writes those costs, and what the engine does under arrivals, into --costs; without it the
committed ones are read. The simulation routes with loragraph.cluster.policy itself; routers see
loads and holdings as they are. First the simulation is checked: one replica against the engine
under the same arrivals. Then: 1,000 replicas with 100,000 adapters; rising load; a burst for one
adapter; replicas needed to hold a first token. --quick does all of it smaller.

--json FILE keeps the figures, --chart FILE draws them (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chart import check_chart
from benchmarks.cluster_chart import draw
from benchmarks.cluster_costs import CHECK_S, N_ADAPTERS, N_SLOTS, Costs, measure, read_costs
from benchmarks.cluster_load import Burst, Shape, arrivals, shares
from benchmarks.cluster_replica import Limits
from benchmarks.cluster_run import Cluster, Outcome
from loragraph.cluster.policy import POLICIES

COSTS = Path(__file__).with_name("cluster_costs.json")
POPULARITIES = {"Zipf 1.0": 1.0, "flat": 0.0}
_BURST = (20.0, 40.0)
_BURST_LENGTH_S = 60.0
_MAX_NEEDED = 8  # times the fewest replicas


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated."""

    n_replicas: int = 1000
    n_adapters: int = 100_000
    length_s: float = 20.0
    n_small: int = 32  # replicas of all but the first part
    small_adapters: int = 3200
    small_s: float = 40.0
    rates: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5)  # requests a second and replica
    rate: float = 1.25
    target_s: float = 0.6  # of the first token, p95


QUICK = Size(50, 5000, 5.0, 8, 800, 8.0, (1.0, 2.0))


@dataclass(frozen=True, slots=True)
class Simulator:
    """Costs and limits of all runs."""

    costs: Costs
    limits: Limits
    shape: Shape

    def run(
        self,
        policy: str,
        n: int,
        n_adapters: int,
        exponent: float,
        rate: float,
        length_s: float,
        burst: Burst | None = None,
    ) -> Outcome:
        """`rate`: of the whole. Warmed by as many requests as there are adapters, and no fewer."""
        trace = arrivals(rate, length_s, n_adapters, exponent, seed=11, burst=burst)
        cluster = Cluster(n, POLICIES[policy](), self.costs, self.limits, self.shape)
        rng = np.random.default_rng(5)
        warm = rng.choice(n_adapters, max(n_adapters, 100 * n), p=shares(n_adapters, exponent))
        cluster.warm(warm.tolist())
        return cluster.run(trace, watch=burst.adapter if burst else -2)


def check(costs: Costs, served: Sequence[dict[str, float]], shape: Shape) -> list[dict[str, Any]]:
    """One simulated replica beside the engine under the same arrivals."""
    rows = []
    for real in served:
        trace = arrivals(real["rate"], CHECK_S, N_ADAPTERS, 1.0, seed=7, base_share=0.1)
        limits = Limits(n_slots=N_SLOTS, link_bytes_per_s=0)
        policy = POLICIES["random"]()
        row = Cluster(1, policy, costs, limits, shape).run(trace).row(shape.n_tokens)
        for name in ("tokens_per_s", "first_p50_s", "first_p95_s"):
            ratio = row[name] / real[name]
            rows.append(
                {"rate": real["rate"], "what": name, "real": real[name], "sim": row[name]}
                | {"ratio": ratio}
            )
    return rows


def everything(sim: Simulator, size: Size, report: Callable[[str], None]) -> dict[str, Any]:
    """All parts but the check."""
    out: dict[str, Any] = {"large": [], "sweep": [], "burst": [], "needed": []}
    small = (size.n_small, size.small_adapters)
    for name, exponent in POPULARITIES.items():
        for policy in POLICIES:
            labels = {"popularity": name, "policy": policy}
            total = size.rate * size.n_replicas
            one = sim.run(policy, size.n_replicas, size.n_adapters, exponent, total, size.length_s)
            out["large"].append(labels | one.row(sim.shape.n_tokens))
            report(f"large {out['large'][-1]}")
            for rate in size.rates:
                one = sim.run(policy, *small, exponent, rate * size.n_small, size.small_s)
                out["sweep"].append(labels | {"rate": rate} | one.row(sim.shape.n_tokens))
            out["needed"].append(labels | {"n": needed(sim, size, policy, exponent)})
            report(f"needed {out['needed'][-1]}")
    for policy in POLICIES:
        out["burst"].append({"policy": policy} | burst(sim, size, policy))
    return out


def needed(sim: Simulator, size: Size, policy: str, exponent: float) -> int | None:
    """The fewest replicas that hold the target for the demand of the middle rate; None: too many.

    More replicas are taken to be no worse, which holds up to noise.
    """
    demand = size.rate * size.n_small

    def holds(n: int) -> bool:
        one = sim.run(policy, n, size.small_adapters, exponent, demand, size.small_s)
        return one.row(sim.shape.n_tokens)["first_p95_s"] <= size.target_s

    low, high = max(size.n_small // 4, 1), max(size.n_small // 4, 1) * _MAX_NEEDED
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def burst(sim: Simulator, size: Size, policy: str) -> dict[str, Any]:
    """One adapter, cold before, gets half as much as all others together, for a while."""
    hot = Burst(*_BURST, rate=0.5 * size.rate * size.n_small, adapter=size.small_adapters - 1)
    demand = size.rate * size.n_small
    one = sim.run(
        policy, size.n_small, size.small_adapters, 1.0, demand, _BURST_LENGTH_S, burst=hot
    )
    bins: dict[int, list[float]] = {}
    for job in one.jobs:
        bins.setdefault(int(job.at // 2) * 2, []).append(job.first - job.at)
    during = [j.first - j.at for j in one.jobs if _BURST[0] <= j.at < _BURST[1]]
    return {
        "p95": [(t, float(np.quantile(own, 0.95))) for t, own in sorted(bins.items())],
        "serving": list(one.spread),
        "during_p95_s": float(np.quantile(during, 0.95)),
        "loads": one.counts.n_loads,
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/scale.md."""
    lines = ["| requests/s | figure | engine | simulation | ratio |", "|---:|---|---:|---:|---:|"]
    for c in found["check"]:
        unit = 1 if c["what"] == "tokens_per_s" else 1000
        lines.append(
            f"| {c['rate']:g} | {_FIGURES[c['what']]} | {c['real'] * unit:.0f} "
            f"| {c['sim'] * unit:.0f} | {c['ratio']:.2f} |"
        )
    lines += [
        "",
        "| popularity | policy | adapter hits | prefix hits | loads/s | p50, ms | p95, ms "
        "| tokens/s | busy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['popularity']} | {r['policy']} | {r['adapter_hits']:.0%} | {r['prefix_hits']:.0%} "
        f"| {r['loads_per_s']:,.0f} | {r['first_p50_s'] * 1000:,.0f} "
        f"| {r['first_p95_s'] * 1000:,.0f} | {r['tokens_per_s']:,.0f} | {r['busy']:.0%} |"
        for r in found["large"]
    ]
    rates = list(dict.fromkeys(r["rate"] for r in found["sweep"]))
    lines += [
        "",
        "| popularity | policy | " + " | ".join(f"{rate:g}" for rate in rates) + " | needed |",
        "|---|---|" + "---:|" * (len(rates) + 1),
    ]
    for n in found["needed"]:
        own = [r for r in found["sweep"] if r["popularity"] == n["popularity"]]
        cells = [f"{r['first_p95_s'] * 1000:,.0f}" for r in own if r["policy"] == n["policy"]]
        lines.append(
            f"| {n['popularity']} | {n['policy']} | {' | '.join(cells)} | {n['n'] or 'not held'} |"
        )
    lines += [
        "",
        "| policy | p95 in the burst, ms | replicas at most | loads |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {b['policy']} | {b['during_p95_s'] * 1000:,.0f} "
        f"| {max(n for _, n in b['serving'])} | {b['loads']} |"
        for b in found["burst"]
    ]
    return "\n".join(lines)


_FIGURES = {
    "tokens_per_s": "tokens/s",
    "first_p50_s": "first token, p50, ms",
    "first_p95_s": "first token, p95, ms",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench cluster-sim", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the costs, and end")
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--type", default="Q4_0", help="of the base, for --measure")
    parser.add_argument("--rounds", type=int, default=3, help="for --measure")
    parser.add_argument("--link", type=float, default=125e6, help="bytes/s of fetching adapters")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, or simulates and prints."""
    args = _arguments(argv)
    if args.chart is not None:
        check_chart()

    def report(text: str) -> None:
        print(text, flush=True)

    if args.measure:
        measure(args.costs, args.type, args.rounds, report)
        return
    costs, document = read_costs(args.costs)
    sim = Simulator(costs, replace(Limits(), link_bytes_per_s=args.link), Shape())
    found = {"check": check(costs, document["served"], sim.shape)}
    found |= everything(sim, QUICK if args.quick else Size(), report)
    report(markdown(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")
    if args.chart is not None:
        draw(found, args.chart)


if __name__ == "__main__":
    main()
