"""Probabilities of what tokens were drawn from, and the least that filters leave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loragraph.engine.engine import Engine
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.engine.sampler import Sampler
from loragraph.vocab.vocab import Vocab
from tests.engine.test_sampler import _OFF, Logits, _draws, _logits, _twin
from tests.numerics.runs import random_tokens

CHAINS: list[dict[str, Any]] = [
    _OFF,
    {**_OFF, "top_k": 5},
    {**_OFF, "top_k": 1},
    {**_OFF, "top_p": 0.7},
    {**_OFF, "min_p": 0.2},
    {**_OFF, "typical_p": 0.6},
    {**_OFF, "temperature": 0.5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
]


def told(vocab: Vocab, logits: Logits, n: int, **params: Any) -> list[TokenLogprob]:
    """What is told of `n` draws."""
    asked = SamplingParams(post_sampling_probs=True, **{"logprobs": 128, **params})
    with Sampler(vocab, asked) as sampler:
        return [sampler.drawn(sampler.sample(logits)) for _ in range(n)]


@pytest.mark.parametrize("params", CHAINS, ids=str)
def test_they_are_the_twins(bpe: Vocab, params: dict[str, Any]) -> None:
    """Of each candidate; asking changes no draw."""
    logits = _logits(bpe, 1)
    expected = _twin(logits, **params)

    found = told(bpe, logits, 20, seed=3, **params)

    assert [one.token for one in found] == _draws(bpe, logits, 20, seed=3, **params)
    for one in found:
        assert math.exp(one.logprob) == pytest.approx(expected[one.token], rel=1e-4)
        assert len(one.top) == min(128, len(expected))
        values = [logprob for _, logprob in one.top]
        assert values == sorted(values, reverse=True)
        for token, logprob in one.top:
            assert math.exp(logprob) == pytest.approx(expected[token], rel=1e-4)


def test_bias_grammar_and_xtc_come_before(bpe: Vocab) -> None:
    """What they take away has no place among the candidates; nothing else has."""
    logits = _logits(bpe, 2)
    best = [int(token) for token in np.argsort(-logits)[:3]]
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.01}

    without = told(bpe, logits, 1, logit_bias={best[0]: -math.inf}, **_OFF)[0]
    one_byte = told(bpe, logits, 1, grammar='root ::= "a" "b"', **_OFF)[0]
    excluded = told(bpe, logits, 5, **{**_OFF, "temperature": 0.7}, **xtc)

    assert without.top[0][0] == best[1]
    assert len(one_byte.top) < 5
    assert sum(math.exp(logprob) for _, logprob in one_byte.top) == pytest.approx(1)
    for one in excluded:
        assert best[0] not in [token for token, _ in one.top]
        assert one.token in [token for token, _ in one.top]


@pytest.mark.parametrize("mirostat", [1, 2])
@pytest.mark.parametrize("top_k", [0, 40])
def test_mirostat(bpe: Vocab, mirostat: int, top_k: int) -> None:
    """What it truncated to: the drawn token is there, and all add up to 1."""
    found = told(bpe, _logits(bpe, 4), 6, seed=1, mirostat=mirostat, mirostat_tau=2.0, top_k=top_k)

    for one in found:
        assert dict(one.top)[one.token] == one.logprob
        assert sum(math.exp(logprob) for _, logprob in one.top) <= 1 + 1e-9


def test_greedy_leaves_one(bpe: Vocab) -> None:
    """With probability 1."""
    logits = _logits(bpe, 1)
    best = int(logits.argmax())

    assert told(bpe, logits, 1, temperature=0) == [TokenLogprob(best, 0.0, ((best, 0.0),))]
    assert told(bpe, logits, 1, temperature=0, logprobs=0) == [TokenLogprob(best, 0.0)]


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.01}, {"min_p": 0.9}, {"typical_p": 0.01}, {"top_p": 0.01, "min_p": 0.99}],
    ids=str,
)
def test_min_keep(bpe: Vocab, top_k: int, filters: dict[str, Any]) -> None:
    """Filters that would leave next to nothing leave that many, and 0 and 1 mean the same."""
    logits = _logits(bpe, 5)
    params = {**_OFF, "top_k": top_k, "temperature": 3.0, "seed": 2, **filters}

    counts = {n: len(told(bpe, logits, 1, min_keep=n, **params)[0].top) for n in (0, 1, 7, 40)}

    assert counts[0] == counts[1] < 7
    assert counts[7] == 7
    assert counts[40] == 40
    drawn = set(_draws(bpe, logits, 300, min_keep=7, **params))
    assert 3 < len(drawn) <= 7
    if "typical_p" not in filters:
        assert drawn <= set(np.argsort(-logits)[:7].tolist())


def test_of_requests_in_one_batch(model: Model) -> None:
    """Each has the kind that it asks for, in streams too, and none changes what is drawn."""
    prompt = random_tokens(12)
    options: dict[str, Any] = {"seed": 4, "max_tokens": 6, "ignore_eos": True, "top_k": 5}
    with Engine(model, n_ctx=256) as engine:
        kinds: list[dict[str, Any]] = [
            {},
            {"logprobs": 5},
            {"logprobs": 5, "post_sampling_probs": True},
        ]
        requests = [Request(prompt, params=SamplingParams(**options, **kind)) for kind in kinds]
        plain, before, after = (one.choices[0] for one in engine.generate_batch(requests))
        with engine.stream(prompt, requests[2].params) as stream:
            events = list(stream)

    assert plain.tokens == before.tokens == after.tokens
    for own, drawn in zip(before.logprobs, after.logprobs, strict=True):
        assert sum(math.exp(logprob) for _, logprob in drawn.top) == pytest.approx(1)
        assert sum(math.exp(logprob) for _, logprob in own.top) < 1
    assert [event.logprob for event in events] == pytest.approx(
        [one.logprob for one in after.logprobs], abs=1e-2
    )
