"""A short load over HTTP; the long one is scripts/bench serve-http."""

from __future__ import annotations

from pathlib import Path

from benchmarks.http_client import ClientProcess, first_difference
from benchmarks.serve_http import cost, listening, load
from loragraph.engine.engine import Engine
from tests.tiny import TinyAdapter, TinyLlama


def test_many_clients_get_their_answers_and_leave_nothing(tmp_path: Path) -> None:
    """Random mixes on three routes, evictions, clients that leave or read slowly."""
    tiny = TinyLlama()
    base = tiny.write(tmp_path / "base.gguf")
    adapters = {f"a{i}": tmp_path / f"{i}.gguf" for i in range(4)}
    for i, path in enumerate(adapters.values()):
        TinyAdapter(rank=2 + i, seed=i + 1).write(path, tiny)
    with (
        Engine(base, adapters, n_ctx=1024, max_sequences=8, max_adapters=2, n_threads=1) as engine,
        ClientProcess() as clients,
        listening(engine) as (port, state),
    ):
        report = load(
            *(engine, port, state, clients, list(adapters)),
            seconds=4,
            n_clients=16,
            n_slow=2,
            n_cases=24,
        )
        found = cost(engine, port, clients, ["a0", "a1"], n_rounds=1)

    assert report.problems == []
    for phase in report.phases.values():
        assert phase["n_complete"] > 0
        assert phase["n_left"] > 0
        assert phase["first_ms"].keys() == phase["token_ms"].keys() == {"p50", "p95", "p99"}
    assert report.n_evictions > 0
    assert found["http tokens/s"] > 0


def test_a_difference_is_found_wherever_it_is() -> None:
    """In a token, and in the length."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 5, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
