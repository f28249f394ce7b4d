"""What an engine's adapters may take: bytes in memory, and how many a token carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import CapacityError, MixTooLargeError
from loragraph.graph.lowrank.base import MAX_MIX
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyLlama

PROMPT = random_tokens(12)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One more file than a token can carry, all of the same size."""
    folder = tmp_path_factory.mktemp("budgets")
    paths = [folder / f"{i}.gguf" for i in range(MAX_MIX + 1)]
    for i, path in enumerate(paths):
        TinyAdapter(rank=4, seed=i).write(path, TinyLlama())
    return paths


@pytest.fixture(scope="module")
def model(paths: Sequence[Path]) -> Iterator[Model]:
    """One model for the module."""
    base = TinyLlama().write(paths[0].parent / "m.gguf")
    with Model.load(base, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def n_bytes(model: Model, paths: Sequence[Path]) -> int:
    """Of one adapter in memory."""
    with Engine(model, {"a": paths[0]}, n_ctx=64) as engine:
        engine.preload("a")
        return engine.stats().pool.nbytes


def test_adapters_in_memory_never_pass_max_adapter_bytes(
    model: Model, paths: Sequence[Path], n_bytes: int
) -> None:
    """Two of five have room: all are served, with the texts of an engine that keeps all."""
    names = {f"n{i}": path for i, path in enumerate(paths[:5])}
    requests = [
        Request([*PROMPT, 9 + i], {f"n{i % 5}": 1.0, f"n{(i + 1) % 5}": 0.5}, GREEDY)
        for i in range(20)
    ]
    with Engine(model, names, n_ctx=512) as engine:
        expected = [engine.run(request).tokens for request in requests]
        assert engine.stats().pool.nbytes == 5 * n_bytes
    limit = 3 * n_bytes - 1
    with Engine(model, names, n_ctx=512, max_adapter_bytes=limit) as engine:
        found = []
        for request in requests:
            found.append(engine.run(request).tokens)
            assert engine.stats().pool.nbytes == 2 * n_bytes
        assert [result.tokens for result in engine.generate_batch(requests)] == expected
        stats = engine.stats().pool
        assert (stats.n_resident, stats.n_tickets) == (2, 0)
        assert stats.n_evictions == stats.n_loads - 2 >= 20
    assert found == expected


def test_what_max_adapter_bytes_cannot_hold_is_refused(
    model: Model, paths: Sequence[Path], n_bytes: int
) -> None:
    """A mix, an adapter, and what has no room beside a pin; others go on."""
    names = {f"n{i}": path for i, path in enumerate(paths[:3])}
    both = {"n0": 1.0, "n1": 1.0}
    with Engine(model, names, n_ctx=256, max_adapter_bytes=2 * n_bytes) as engine:
        phrase = rf"at most {2 * n_bytes} bytes together, got {3 * n_bytes}.*max_adapter_bytes"
        with pytest.raises(CapacityError, match=phrase):
            engine.generate(PROMPT, GREEDY, adapters={**both, "n2": 1.0})
        assert len(engine.generate(PROMPT, GREEDY, adapters=both).tokens) == 6
        engine.pin("n2")
        with pytest.raises(CapacityError, match="unpin"):
            engine.generate(PROMPT, GREEDY, adapters=both)
        assert len(engine.generate(PROMPT, GREEDY, adapters={"n1": 1.0}).tokens) == 6
        engine.unpin("n2")
        assert len(engine.generate(PROMPT, GREEDY, adapters=both).tokens) == 6
    with Engine(model, names, n_ctx=256, max_adapter_bytes=n_bytes - 1) as engine:
        with pytest.raises(MixTooLargeError, match=f"at most {n_bytes - 1} bytes"):
            engine.generate(PROMPT, adapters={"n0": 1.0})
        assert len(engine.generate(PROMPT, GREEDY).tokens) == 6
        assert engine.stats().pool.n_loads == 0


@pytest.mark.parametrize("lowering", ["routed", "stacked"])
def test_a_request_takes_as_many_adapters_as_a_token_carries(
    model: Model, paths: Sequence[Path], lowering: str
) -> None:
    """One more is refused and holds nothing; files of one content count once."""
    names = {f"n{i}": path for i, path in enumerate(paths)} | {"again": paths[0]}
    most = {f"n{i}": 0.1 for i in range(MAX_MIX)}
    with Engine(model, names, n_ctx=256, lowering=lowering) as engine:  # type: ignore[arg-type]
        result = engine.generate(PROMPT, GREEDY, adapters=most)
        assert len(result.adapters) == MAX_MIX
        with pytest.raises(MixTooLargeError, match=f"at most {MAX_MIX} adapters a token, got 17"):
            engine.generate(PROMPT, GREEDY, adapters={**most, f"n{MAX_MIX}": 0.1})
        stats = engine.stats()
        assert (stats.core.n_jobs, stats.pool.n_tickets, stats.scheduler.n_cells_in_use) == (0,) * 3
        split = {**most, "n0": 0.05, "again": 0.05}
        assert engine.generate(PROMPT, GREEDY, adapters=split).tokens == result.tokens
        engine.combine("all", {**most, f"n{MAX_MIX}": 0.1})
        assert len(engine.generate(PROMPT, GREEDY, adapters={"all": 1.0}).tokens) == 6


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_the_documents_say_how_many_adapters_a_token_carries(page: str) -> None:
    """The number of the program."""
    assert f"at most {MAX_MIX} adapters" in (ROOT / page).read_text("utf-8")
    assert f"{MAX_MIX} unlike adapters" in " ".join((Request.__doc__ or "").split())
