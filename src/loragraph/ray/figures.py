"""Metrics and health of all replicas together, from what each says of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from loragraph.ray.forward import ForwardCounts

_MEANS = {
    "llamacpp:prompt_tokens_seconds": ("llamacpp:prompt_tokens", "llamacpp:prompt_seconds"),
    "llamacpp:predicted_tokens_seconds": (
        "llamacpp:tokens_predicted",
        "llamacpp:tokens_predicted_seconds",
    ),
}
_LARGEST = frozenset({"llamacpp:n_tokens_max", "llamacpp:n_busy_slots_per_decode"})


def merged_metrics(
    texts: Mapping[str, str], counts: ForwardCounts, version: int, *, by_replica: bool
) -> bytes:
    """Prometheus text of all: each replica's samples with its id as a label, or their sums.

    Means are taken of the sums; of what has no sum, the largest. What the front counts is added.
    """
    families: dict[str, list[tuple[str, Metric]]] = {}
    for id_, text in texts.items():
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, []).append((id_, family))
    merge = _labelled if by_replica else _summed
    out = [merge(found) for found in families.values()]
    if not by_replica:
        _take_means(out)
    registry = CollectorRegistry()
    registry.register(_Fixed([*out, *_front(counts, len(texts), version)]))
    return generate_latest(registry)


def replicas_json(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What GET /replicas says of each, by id."""
    return [
        {
            "id": one["id"],
            "status": one["status"],
            "running": one["n_runs"],
            "busy": one["busy"],
            "capacity": one["capacity"],
            "catalogue_version": one["version"],
            "resident": [{"name": name, "generation": n} for name, n in one["resident"]],
        }
        for one in sorted(found, key=lambda one: str(one["id"]))
    ]


class _Fixed(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing, as nothing has to be compared."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All."""
        return self._metrics


def _labelled(found: Sequence[tuple[str, Metric]]) -> Metric:
    first = found[0][1]
    out = Metric(first.name, first.documentation, first.type)
    for id_, family in found:
        for sample in family.samples:
            out.add_sample(sample.name, {**sample.labels, "replica": id_}, sample.value)
    return out


def _summed(found: Sequence[tuple[str, Metric]]) -> Metric:
    first = found[0][1]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for _, family in found:
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            if key not in values:
                values[key] = sample.value
            elif first.name in _LARGEST:
                values[key] = max(values[key], sample.value)
            else:
                values[key] += sample.value
    out = Metric(first.name, first.documentation, first.type)
    for (name, labels), value in values.items():
        out.add_sample(name, dict(labels), value)
    return out


def _take_means(families: Sequence[Metric]) -> None:
    """Replaces sums of means by the mean of the sums."""
    by_name = {family.name: family for family in families}
    for name, (top, bottom) in _MEANS.items():
        if name in by_name and top in by_name and bottom in by_name:
            n, seconds = (_total(by_name[part]) for part in (top, bottom))
            mean = by_name[name]
            mean.samples = []
            mean.add_sample(name, {}, n / seconds if seconds else 0.0)


def _total(family: Metric) -> float:
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def _front(counts: ForwardCounts, n_replicas: int, version: int) -> Iterable[Metric]:
    p = "loragraph_cluster"
    yield GaugeMetricFamily(f"{p}_replicas", "Replicas that answer.", value=n_replicas)
    yield GaugeMetricFamily(f"{p}_catalogue_version", "Changes of adapters so far.", value=version)
    for name, text, value in (
        ("requests", "Requests sent to replicas by this front.", counts.n_requests),
        ("retries", "Tries after a replica's loss.", counts.n_retries),
        ("cut_answers", "Answers cut off by a replica's loss.", counts.n_cut),
        ("failed_requests", "Requests that no replica took.", counts.n_failed),
    ):
        yield CounterMetricFamily(f"{p}_{name}", text, value=value)
