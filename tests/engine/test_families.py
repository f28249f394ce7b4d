"""The engine on every family: windows, caps and positions hold across requests and sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import AdapterMismatchError, FormatError
from tests.numerics.compare import greedy_agreement
from tests.numerics.runs import Logits, random_tokens
from tests.tiny import TinyAdapter
from tests.tiny_families import TINY_FAMILIES, TinyPhi3

PREFIX = random_tokens(40, seed=1)
PROMPTS = [
    (PREFIX + random_tokens(20, seed=2), {"a": 1.0}),
    (PREFIX + random_tokens(5, seed=3), {"a": 1.0}),
    (PREFIX, {}),
    (PREFIX + random_tokens(5, seed=4), {"b": -0.5}),
    (random_tokens(90, seed=5), {"a": 0.5, "b": 0.5}),
]
N_GREEDY = 8
GREEDY = SamplingParams(temperature=0, max_tokens=N_GREEDY, ignore_eos=True)
BOUND = 0.02  # of one logit: F16 cells, and products of other shapes


def greedy(context: Context, prompt: list[int]) -> list[Logits]:
    """The logits of each step, without the tokens that end a text, as `ignore_eos` has it."""
    ends = list(context.model.vocab.eog_tokens)
    rows: list[Logits] = []
    tokens = prompt
    while len(rows) < N_GREEDY:
        rows.append(context.decode(tokens)[-1])
        rows[-1][ends] = -np.inf
        tokens = [int(rows[-1].argmax())]
    return rows


@pytest.mark.parametrize("arch", TINY_FAMILIES)
def test_requests_together_are_requests_alone(arch: str, tmp_path: Path) -> None:
    """Requests with unlike adapters, in small steps over shared prefixes, give the texts that a
    context of their own gives, up to the first near tie; the prefix of equal adapters is found."""
    tiny = TINY_FAMILIES[arch]()
    paths = {name: tmp_path / f"{name}.gguf" for name in "ab"}
    for seed, path in enumerate(paths.values()):
        TinyAdapter(rank=3 + seed, seed=seed, b_std=0.05).write(path, tiny)
    n_compared = 0
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        with Engine(model, paths, n_ctx=1024, max_batch_tokens=48) as engine:
            requests = [
                Request(prompt, adapters=scales, params=GREEDY) for prompt, scales in PROMPTS
            ]
            results = engine.generate_batch(requests)
        adapters = {name: model.load_adapter(path) for name, path in paths.items()}
        with Context(model, n_ctx=256) as context:
            for (prompt, scales), result in zip(PROMPTS, results, strict=True):
                context.clear()
                context.set_adapters({adapters[name]: scale for name, scale in scales.items()})
                rows = greedy(context, prompt)
                texts = list(result.choices[0].tokens), [int(row.argmax()) for row in rows]
                agreement = greedy_agreement(*texts, np.stack(rows), BOUND)
                assert agreement.agrees, scales
                n_compared += agreement.n_compared
    assert n_compared >= 15  # of 40
    assert results[1].choices[0].n_cached == len(PREFIX)
    assert results[3].choices[0].n_cached == 0


def test_cells_turned_for_long_contexts_are_not_taken_for_short_ones(tmp_path: Path) -> None:
    """A session saved where longrope's short factors held is refused where the long ones do."""
    tiny = TinyPhi3(long_factors=True, rope_orig_ctx=256)
    path = tmp_path / "cells"
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        with Engine(model, n_ctx=256) as engine:
            engine.generate(PREFIX, params=GREEDY)
            assert engine.save_session(path) > 0
        with Engine(model, n_ctx=512, max_sequence_tokens=200) as engine:
            assert engine.load_session(path) > 0  # one sequence still has short ones
        with (
            Engine(model, n_ctx=512) as engine,
            pytest.raises(FormatError, match=r"cells: expected .*long_context=True"),
        ):
            engine.load_session(path)


def test_an_adapter_for_q_alone_says_that_the_base_has_one_matrix(tmp_path: Path) -> None:
    """On a base whose q, k and v are fused, an adapter of attn_q is refused with the name of the
    matrix that there is."""
    tiny = TinyPhi3()
    path = tmp_path / "a.gguf"
    TinyAdapter(targets=("attn_q",)).write(path, replace(tiny, fused_qkv=False))
    with (
        Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model,
        pytest.raises(AdapterMismatchError, match=r"one matrix of this base, 'blk\.0\.attn_qkv"),
    ):
        model.load_adapter(path)
