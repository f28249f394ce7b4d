"""Passes over the rows of a step: rounds, errors, and the threads that run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine import row_threads
from loragraph.engine.engine import Engine
from loragraph.engine.params import SamplingParams
from loragraph.engine.passes import together
from loragraph.engine.request import Request
from loragraph.engine.row_threads import RowThreads
from loragraph.errors import BackendError, LifecycleError, LoragraphError
from loragraph.ggml.handles import CpuBackend
from loragraph.ggml.lib import Library
from loragraph.kernels.sampling import (
    LogitRow,
    Passes,
    RowCall,
    RowCallsNode,
    alone,
    run_alone,
)
from tests.numerics.runs import random_tokens
from tests.tiny import TinyLlama

WIDE = 5000


def step(row: LogitRow, logits: np.ndarray[Any, Any], n: int) -> Passes[list[int]]:
    """A scan and `n` draws."""
    yield from row.read(logits)
    found = []
    for i in range(n):
        found.append((yield from row.draw((i + 0.5) / n, 0.8)))
    return found


def logits_of(n_rows: int) -> np.ndarray[Any, Any]:
    """Of so many rows, (n_rows, WIDE) f32."""
    return np.random.default_rng(7).standard_normal((n_rows, WIDE)).astype(np.float32)


def test_a_round_has_the_next_call_of_every_row_that_has_one() -> None:
    sizes: list[int] = []

    def run(calls: Sequence[RowCall]) -> None:
        sizes.append(len(calls))
        run_alone(calls)

    wanted = [(x, n) for x, n in zip(logits_of(4), (0, 1, 3, 1), strict=True)]
    found = together([step(LogitRow(WIDE), x, n) for x, n in wanted], run)
    assert sizes == [4, 3, 1, 1, 0]
    assert found == [alone(step(LogitRow(WIDE), x, n)) for x, n in wanted]


def test_nothing_to_do() -> None:
    assert together([], run_alone) == []


@pytest.mark.parametrize("when", [0, 1])
def test_one_rows_error_is_its_own(when: int) -> None:
    def broken(row: LogitRow, logits: np.ndarray[Any, Any]) -> Passes[list[int]]:
        for _ in range(when):
            yield from row.read(logits)
        raise BackendError("of one row")

    rows = logits_of(3)
    passes = [step(LogitRow(WIDE), x, 2) for x in rows]
    passes.insert(1, broken(LogitRow(WIDE), rows[0]))
    found = together(passes, run_alone)
    assert isinstance(found[1], BackendError)
    assert [one for one in found if not isinstance(one, LoragraphError)] == [
        alone(step(LogitRow(WIDE), x, 2)) for x in rows
    ]


def test_where_the_calls_fail_every_row_puts_its_changes_back() -> None:
    put_back: list[int] = []

    def changes(i: int, row: LogitRow, logits: np.ndarray[Any, Any]) -> Passes[None]:
        try:
            yield from row.read(logits)
        finally:
            put_back.append(i)

    def run(calls: Sequence[RowCall]) -> None:
        raise BackendError("no threads")

    with pytest.raises(BackendError, match="no threads"):
        together([changes(i, LogitRow(WIDE), x) for i, x in enumerate(logits_of(3))], run)
    assert sorted(put_back) == [0, 1, 2]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_rows", [0, 1, 2, 7, 40])
def test_the_backends_threads_find_the_same(lib: Library, n_threads: int, n_rows: int) -> None:
    """Several computes of one graph, with other rows each."""
    rows = logits_of(n_rows)
    with CpuBackend(lib, n_threads) as backend:
        threads = RowThreads(backend)
        for n in (1, 4):
            found = together([step(LogitRow(WIDE), x, n) for x in rows], threads.run)
            assert found == [alone(step(LogitRow(WIDE), x, n)) for x in rows]
        threads.close()
        threads.close()
        with pytest.raises(LifecycleError):
            threads.run([])


def test_texts_are_those_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of sampling, 14 unlike requests, sampled on one thread and on three."""
    base = TinyLlama().write(tmp_path / "m.gguf")
    off: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {**off, "typical_p": 0.5},
        {**off, "top_n_sigma": 1.0},
        {**off, "mirostat": 2},
        {"temperature": 1.0, "repeat_penalty": 1.2, "logit_bias": {7: 3.0}},
        {"temperature": 0.0, "grammar": "root ::= [a-z ]+"},
    ]
    requests = [
        Request(
            random_tokens(9, seed=i),
            params=SamplingParams(seed=i, max_tokens=8, ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i in range(14)
    ]
    shared: list[int] = []
    write = RowCallsNode.write

    def counted(node: RowCallsNode, calls: Sequence[RowCall]) -> None:
        shared.append(len(calls))
        write(node, calls)

    monkeypatch.setattr(RowCallsNode, "write", counted)
    texts = {}
    for fewest in (1 << 60, 2):
        monkeypatch.setattr(row_threads, "_FEWEST", fewest)
        with Engine(base, n_ctx=1024, max_sequences=14, n_threads=3) as engine:
            texts[fewest] = [one.tokens for one in engine.generate_batch(requests)]
        assert bool(shared) == (fewest == 2)
    assert max(shared) == len(requests)
    assert texts[2] == texts[1 << 60]
