"""Sequences that lose their cells on a real model: their texts are those of a run alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loragraph.engine.assembly import AttentionName
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyLlama

INVOCATION = [301, 302]
PROMPT = [token for token in random_tokens(48) if token not in INVOCATION][:40]
N_CELLS = 320  # of 8 sequences that come to 100 each

WAYS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.3, frequency_penalty=0.3),
    SamplingParams(seed=7, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0),
    SamplingParams(seed=3, mirostat=2),
    SamplingParams(seed=9, dry_multiplier=1.0, xtc_probability=0.5),
    SamplingParams(seed=4, grammar="root ::= [a-z ]+"),
]
MIXES: list[dict[str, float]] = [{}, {"plain": 1.0}, {"alora": 1.0, "plain": 0.5}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model; its folder holds the adapters."""
    folder = tmp_path_factory.mktemp("preemption")
    tiny = TinyLlama()
    TinyAdapter(rank=3, seed=1).write(folder / "plain.gguf", tiny)
    alora = TinyAdapter(rank=4, seed=9, invocation_tokens=INVOCATION)
    alora.write(folder / "alora.gguf", tiny)
    with Model.load(tiny.write(folder / "m.gguf"), n_threads=1) as model:
        yield model


def engine_of(model: Model, attention: AttentionName) -> Engine:
    """One with few cells, whose sums differ by no more than their order."""
    folder = Path(model.path).parent
    return Engine(
        model,
        {name: folder / f"{name}.gguf" for name in ("plain", "alora")},
        n_ctx=N_CELLS,
        max_sequences=8,
        max_batch_tokens=64,
        kv_type="f32",
        attention=attention,
    )


@pytest.mark.parametrize("attention", ["cells", "plain"])
def test_a_preempted_text_is_that_of_an_undisturbed_run(
    model: Model, attention: AttentionName
) -> None:
    """Random state, penalties, DRY, mirostat, grammar and an aLoRA's start survive."""
    requests = [
        Request(
            [3 + i, *PROMPT[i:], *(INVOCATION if "alora" in mix else ()), 5],
            mix,
            replace(way, max_tokens=60, ignore_eos=True),
        )
        for i, way in enumerate(WAYS)
        for mix in MIXES
    ]
    with engine_of(model, attention) as engine:
        crowded = engine.generate_batch(requests)
        n_preempted = engine.stats().scheduler.n_preemptions
    with engine_of(model, attention) as engine:
        alone = [
            engine.run(replace(request, cache_salt=str(i))) for i, request in enumerate(requests)
        ]
        assert engine.stats().scheduler.n_preemptions == 0
    assert n_preempted > len(WAYS)
    for request, one, other in zip(requests, crowded, alone, strict=True):
        assert one.tokens == other.tokens, request
        assert len(one.tokens) == 60
        assert [use.active_from for use in one.adapters] == [
            use.active_from for use in other.adapters
        ]
