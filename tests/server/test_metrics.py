"""Metrics: what is counted for whom, in Prometheus' text, alone and behind a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loragraph.engine.counters import Gaps
from loragraph.server.config import ServerConfig
from loragraph.server.metrics import BASE, OTHER, AdapterLabels, Histogram, ServerMetrics
from loragraph.server.served import Served
from tests.server.serving import serving, write_files

LLAMA_SERVER = {
    "llamacpp:prompt_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
    "llamacpp:prompt_seconds_total",
    "llamacpp:tokens_predicted_total",
    "llamacpp:tokens_predicted_seconds_total",
    "llamacpp:n_decode_total",
    "llamacpp:n_tokens_max",
    "llamacpp:prompt_tokens_seconds",
    "llamacpp:predicted_tokens_seconds",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:n_busy_slots_per_decode",
    "llamacpp:spec_decode_num_draft_tokens_total",
    "llamacpp:spec_decode_num_accepted_tokens_total",
    "llamacpp:spec_decode_num_drafts_total",
}


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every value by name and labels; the text has to be well-formed."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Samples, name: str, **labels: str) -> float:
    """One value."""
    return found[name, frozenset(labels.items())]


def test_a_mix_counts_for_each_of_its_adapters_and_the_base_for_itself() -> None:
    """Requests, tokens and cached tokens by adapter, requests also by how they ended."""
    metrics = ServerMetrics(lambda: None)
    metrics.observe(Served(("a", "b"), "stop", 10, 4, 3, 13, 0.2, 0.1, 0.4))
    metrics.observe(Served(("a",), "length", 5, 0, 2, 7, 0.0, 0.1, 0.1))
    metrics.observe(Served((), "abort", n_generated=1))

    found = samples(metrics.render().decode())

    assert of(found, "loragraph_requests_total", adapter="a", outcome="stop") == 1
    assert of(found, "loragraph_requests_total", adapter="a", outcome="length") == 1
    assert of(found, "loragraph_requests_total", adapter="b", outcome="stop") == 1
    assert of(found, "loragraph_requests_total", adapter=BASE, outcome="abort") == 1
    assert of(found, "loragraph_prompt_tokens_total", adapter="a") == 15
    assert of(found, "loragraph_prompt_tokens_cached_total", adapter="b") == 4
    assert of(found, "loragraph_generated_tokens_total", adapter="a") == 5


def test_times_go_into_the_buckets_that_hold_them() -> None:
    """First token with the wait before it, each gap between tokens, and the wait alone."""
    metrics = ServerMetrics(lambda: None)
    gaps = Gaps()
    for seconds in (0.02, 0.02, 0.02, 0.3):
        gaps.add(seconds)
    metrics.observe(Served(("a",), "stop", 10, 0, 5, 15, 0.2, 0.05, 0.36, gaps))

    found = samples(metrics.render().decode())

    name = "loragraph_first_token_seconds"
    assert of(found, f"{name}_bucket", adapter="a", le="0.1") == 0
    assert of(found, f"{name}_bucket", adapter="a", le="0.25") == 1
    assert of(found, f"{name}_sum", adapter="a") == pytest.approx(0.25)
    name = "loragraph_token_seconds"
    assert of(found, f"{name}_bucket", adapter="a", le="0.01") == 0
    assert of(found, f"{name}_bucket", adapter="a", le="0.025") == 3
    assert of(found, f"{name}_sum", adapter="a") == pytest.approx(0.36)
    assert of(found, f"{name}_count", adapter="a") == 4
    assert of(found, "loragraph_queue_seconds_sum", adapter="a") == pytest.approx(0.2)


def test_a_bucket_includes_its_bound() -> None:
    """As Prometheus' `le` says; the last bucket holds everything."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)

    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]


def test_labels_are_bounded_and_never_change_their_meaning() -> None:
    """The first names keep theirs; later ones, and one called as a common label, share one."""
    labels = AdapterLabels(2)

    assert [labels.of(name) for name in ("x", BASE, "y", "z", "x", OTHER, "w")] == [
        "x", OTHER, "y", OTHER, "x", OTHER, OTHER,
    ]  # fmt: skip


def test_a_thousand_names_make_no_more_than_the_cap_of_series() -> None:
    """Whatever clients call, the number of series is bounded, and nothing is lost."""
    metrics = ServerMetrics(lambda: None, max_labels=3)
    for i in range(1000):
        metrics.observe(Served((f"n{i}",), "stop", 1, 0, 1, 2, 0.0, 0.0, 0.0))

    found = samples(metrics.render().decode())

    counts = {
        dict(labels)["adapter"]: value
        for (name, labels), value in found.items()
        if name == "loragraph_requests_total"
    }
    assert counts == {"n0": 1, "n1": 1, "n2": 1, OTHER: 997}


def test_odd_names_stay_well_formed() -> None:
    """Quotes, newlines and emoji in a name are escaped."""
    metrics = ServerMetrics(lambda: None)
    metrics.observe(Served(('a"\\ü\n😀',), "stop", 1, 0, 1, 2, 0.0, 0.0, 0.0))

    found = samples(metrics.render().decode())

    assert of(found, "loragraph_prompt_tokens_total", adapter='a"\\ü\n😀') == 1


def test_two_servers_in_one_process_count_apart() -> None:
    """No registry is shared."""
    one, two = ServerMetrics(lambda: None), ServerMetrics(lambda: None)
    one.observe(Served())

    assert "outcome" in one.render().decode()
    assert 'outcome="' not in two.render().decode()


def test_metrics_of_a_server(tmp_path: Path) -> None:
    """llama-server's names are all there, and loads, evictions and bytes stand by adapter."""
    write_files(tmp_path)
    config = ServerConfig(with_metrics=True)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
    with serving(tmp_path, config, max_adapters=1) as served, served.client() as http:
        for model in ("alpha", "beta", "alpha", "base"):
            assert http.post("/v1/chat/completions", json={**body, "model": model}).is_success
        answer = http.get("/metrics")

    found = samples(answer.text)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(answer.headers["process-start-time-unix"]) > 1_600_000_000
    assert {name for name, _ in found} >= LLAMA_SERVER
    assert of(found, "loragraph_adapter_loads_total", adapter="alpha") == 2
    assert of(found, "loragraph_adapter_evictions_total", adapter="alpha") == 1
    assert of(found, "loragraph_adapter_evictions_total", adapter="beta") == 1
    assert of(found, "loragraph_adapter_load_seconds_total", adapter="beta") > 0
    assert of(found, "loragraph_adapter_resident_bytes", adapter="alpha") > 1000
    assert of(found, "loragraph_adapter_resident_bytes", adapter="beta") == 0
    assert of(found, "llamacpp:requests_processing") == 0
    assert of(found, "llamacpp:requests_deferred") == 0
    assert of(found, "llamacpp:n_busy_slots_per_decode") == 1
    assert of(found, "llamacpp:tokens_predicted_total") == 16
    n_prompt = of(found, "llamacpp:prompt_tokens_total")
    n_cached = of(found, "llamacpp:prompt_tokens_cached_total")
    labels = ("alpha", "beta", "base")
    by_adapter = [of(found, "loragraph_prompt_tokens_total", adapter=one) for one in labels]
    assert n_prompt + n_cached == sum(by_adapter)
    assert n_cached == of(found, "loragraph_prompt_tokens_cached_total", adapter="alpha") > 0
    n_longest = of(found, "llamacpp:n_tokens_max")
    assert n_longest == sum(by_adapter) / 4 + 4
    assert of(found, "llamacpp:prompt_seconds_total") > 0
    assert of(found, "llamacpp:tokens_predicted_seconds_total") > 0
    assert of(found, "loragraph_queue_seconds_count", adapter="alpha") == 2
    assert of(found, "loragraph_token_seconds_count", adapter="alpha") == 6


def test_counters_of_loads_never_fall(tmp_path: Path) -> None:
    """A name that is registered anew, or unloaded, keeps what was counted for it."""
    write_files(tmp_path)
    config = ServerConfig(with_metrics=True)
    with serving(tmp_path, config) as served, served.client() as http:
        path = tmp_path / "adapters" / "alpha.gguf"

        def loads() -> float:
            found = samples(http.get("/metrics").text)
            return of(found, "loragraph_adapter_loads_total", adapter="alpha")

        served.engine.load_adapter("alpha", path, preload=True)
        first = loads()
        served.engine.load_adapter("alpha", path, preload=True)
        second = loads()
        served.engine.unload_adapter("alpha")

        assert (first, second, loads()) == (1, 2, 2)


def test_failures_are_counted_over_http(tmp_path: Path) -> None:
    """Adapters whose file is no more, by adapter, and the requests that ended so, by outcome."""
    write_files(tmp_path)
    with (
        serving(tmp_path, ServerConfig(with_metrics=True)) as served,
        served.client() as http,
    ):
        path = tmp_path / "adapters" / "alpha.gguf"
        path.write_bytes(path.read_bytes()[:-64])  # registered, not loaded yet
        body = {"prompt": "a", "max_tokens": 1, "model": "alpha"}
        statuses = [http.post("/v1/completions", json=body).status_code for _ in range(2)]
        assert all(status >= 400 for status in statuses)
        assert http.post("/v1/completions", json={**body, "model": "beta"}).is_success
        found = samples(http.get("/metrics").text)

    failures = "loragraph_adapter_load_failures_total"
    assert of(found, failures, adapter="alpha") == 1  # what is wrong with a file is remembered
    assert of(found, failures, adapter="beta") == 0
    assert of(found, "loragraph_requests_total", adapter="alpha", outcome="error") == 2
    assert of(found, "loragraph_requests_total", adapter="beta", outcome="length") == 1


def test_without_the_flag_there_are_none(tmp_path: Path) -> None:
    """501 in llama-server's words; before the engine is there the route works too."""
    write_files(tmp_path)
    with serving(tmp_path) as served, served.client() as http:
        answer = http.get("/metrics")

    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["type"] == "not_supported_error"
    assert "`--metrics`" in error["message"]
