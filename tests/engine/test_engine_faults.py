"""The faults of llama-server on a real model: what each gives is what it gives from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.request import Request, Result
from tests.engine import test_engine
from tests.engine.test_engine import PROMPT, Files, Oracle, X, Y

GREEDY = replace(test_engine.GREEDY, logprobs=0)

Parts = Sequence[tuple[int, Mapping[str, float]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files, not to be written to."""
    return Files(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def model(files: Files) -> Iterator[Model]:
    """One model for the module."""
    with Model.load(files.base, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def oracle(model: Model, files: Files) -> Iterator[Oracle]:
    """One context for the module."""
    oracle = Oracle(model, files)
    yield oracle
    oracle.context.close()


@pytest.fixture
def engine(model: Model, files: Files) -> Iterator[Engine]:
    """An engine of the test's own, with all adapters."""
    with Engine(model, files.paths, n_ctx=1024) as engine:
        yield engine


def activated(start: int) -> Parts:
    """An aLoRA that is active from this token on."""
    return [(0, {}), (start, {"alora": 1.0})]


def check(oracle: Oracle, result: Result, prompt: Sequence[int], parts: Parts) -> None:
    """Each token has the log-probability that it has alone, given those before it."""
    found = [one.logprob for one in result.choices[0].logprobs or ()]
    assert len(found) == len(result.tokens) == GREEDY.max_tokens
    logits = oracle.logits([*prompt, *result.tokens], parts)[len(prompt) - 1 : -1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = logprobs[np.arange(len(found)), list(result.tokens)]
    assert np.abs(expected - found).max() <= 0.005  # logits of F16 cells, in steps of other shapes


def test_fault_1_stale_kv_after_a_global_switch(engine: Engine, oracle: Oracle) -> None:
    """A, B, A at another scale, the base: each from nothing."""
    for mix in ({"a": 1.0}, {"b": 1.0}, {"a": 0.5}, {}):
        result = engine.generate(PROMPT, GREEDY, adapters=mix)
        assert result.n_cached == 0
        check(oracle, result, PROMPT, [(0, mix)])


def test_fault_2_host_cache_blind_to_adapters(
    model: Model, files: Files, oracle: Oracle, tmp_path: Path
) -> None:
    """Cells that went to disk and came back are those of the adapter that computed them."""
    with Engine(model, files.paths, n_ctx=1024) as engine:
        engine.generate(PROMPT, GREEDY, adapters={"a": 1.0})
        engine.save_session(tmp_path / "cells")
    with Engine(model, files.paths, n_ctx=1024) as engine:
        engine.load_session(tmp_path / "cells")
        other = engine.generate(PROMPT, GREEDY, adapters={"b": 1.0})
        same = engine.generate(PROMPT, GREEDY, adapters={"a": 1.0})
    assert (other.n_cached, same.n_cached) == (0, len(PROMPT) - 1)
    check(oracle, other, PROMPT, [(0, {"b": 1.0})])
    check(oracle, same, PROMPT, [(0, {"a": 1.0})])


def test_fault_3_overlapping_invocation_missed(engine: Engine, oracle: Oracle) -> None:
    """x y is found in ...x y y, and in ...x x y."""
    for prompt, start in (([*PROMPT, X, Y, Y, 9], 40), ([*PROMPT, X, X, Y, 9], 41)):
        result = engine.generate(prompt, GREEDY, adapters={"alora": 1.0})
        assert result.adapters[0].active_from == start
        check(oracle, result, prompt, activated(start))


def test_fault_4_invocation_at_index_0_reuses_base_cells(engine: Engine, oracle: Oracle) -> None:
    """After a base run of the same prompt nothing of it is used."""
    prompt = [X, Y, *PROMPT]
    engine.generate(prompt, GREEDY)
    result = engine.generate(prompt, GREEDY, adapters={"alora": 1.0})
    assert result.n_cached == 0
    check(oracle, result, prompt, [(0, {"alora": 1.0})])


def test_fault_5_two_requests_with_one_alora(engine: Engine, oracle: Oracle) -> None:
    """Several in one batch, active from unlike tokens, do not change each other."""
    prompts = [[1, X, Y, 2], [*PROMPT, X, Y, 9], [*PROMPT[:20], X, Y, *PROMPT[20:]], [X, Y, 5, 6]]
    starts = [1, 40, 20, 0]
    requests = [Request(prompt, {"alora": 1.0}, GREEDY) for prompt in prompts]
    results = engine.generate_batch(requests)
    for result, prompt, start in zip(results, prompts, starts, strict=True):
        assert result.adapters[0].active_from == start
        check(oracle, result, prompt, activated(start) if start else [(0, {"alora": 1.0})])


def test_fault_6_token_before_the_invocation_carries_the_adapter(
    engine: Engine, oracle: Oracle
) -> None:
    """It carries the base: a base request finds its cell, and gives the base's text."""
    engine.generate([*PROMPT, X, Y], GREEDY, adapters={"alora": 1.0})
    result = engine.generate([*PROMPT, 1], GREEDY)
    assert result.n_cached == len(PROMPT)
    check(oracle, result, [*PROMPT, 1], [(0, {})])


def test_fault_7_an_empty_list_means_the_base(engine: Engine, oracle: Oracle) -> None:
    """No adapters, and one at scale 0, give the base whatever ran before."""
    engine.generate(PROMPT, GREEDY, adapters={"a": 1.0})
    for mix in ({}, {"a": 0.0}):
        check(oracle, engine.generate(PROMPT, GREEDY, adapters=mix), PROMPT, [(0, {})])


@pytest.mark.parametrize("cancel", [False, True])
def test_equal_prompts_at_once_compute_the_prompt_once(
    model: Model, files: Files, oracle: Oracle, cancel: bool
) -> None:
    """Also where the one that computes is cancelled; each but the first its last token alone."""
    n = 8
    with Engine(model, files.paths, n_ctx=1024, max_batch_tokens=32) as engine:
        requests = [Request(PROMPT, {"a": 1.0}, GREEDY) for _ in range(n)]
        if cancel:  # it computes before the others are there
            first = engine.open(requests[0])
            results = engine.generate_batch(requests[1:])
            first.close()
        else:
            results = engine.generate_batch(requests)
        computed = engine.stats().scheduler.n_computed_tokens
    generated = sum(len(result.tokens) for result in results)
    assert computed <= len(PROMPT) + n + generated + (10 if cancel else 0)
    for result in results:
        check(oracle, result, PROMPT, [(0, {"a": 1.0})])
