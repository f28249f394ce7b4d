"""Embeddings: beside libllama's, in batches with texts and other adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType

from loragraph.engine.embedding import POOLINGS, PooledStates, normalized
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Embedding, Request, Score
from loragraph.errors import BackendError, ContextLengthError, InvalidRequestError
from tests.engine.fake_engine import FakeEngine
from tests.engine.setting import Setting
from tests.numerics.compare import nmse
from tests.numerics.runs import random_tokens
from tests.oracle.libllama import Libllama
from tests.smollm import smollm_path
from tests.tiny import TinyAdapter, TinyLlama

PROMPT = random_tokens(50)
BOUND = 1e-6  # NMSE: F16 cells, and products of other shapes
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

Values = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def shared(setting: Setting) -> Iterator[Model]:
    """One model for the module."""
    with setting.load() as model:
        yield model


def engine_of(model: Model, setting: Setting, **options: Any) -> Engine:
    """With adapters a and b."""
    return Engine(model, dict(zip("ab", setting.paths, strict=True)), n_ctx=1024, **options)


@pytest.fixture
def engine(shared: Model, setting: Setting) -> Iterator[Engine]:
    """An engine of the test's own."""
    with engine_of(shared, setting, max_batch_tokens=32) as engine:
        yield engine


@pytest.mark.parametrize("pooling", POOLINGS)
def test_they_are_libllamas(engine: Engine, setting: Setting, pooling: Any) -> None:
    """Every pooling, of the base and with adapters, for a prompt longer than a step."""
    with Libllama(setting.base, pooling=pooling) as oracle:
        handles = [oracle.load_adapter(path) for path in setting.paths]
        for mix in ({}, {"a": 1.0}, {"a": 0.5, "b": -1.0}):
            scales = dict(zip(handles, (mix.get("a", 0.0), mix.get("b", 0.0)), strict=True))
            oracle.set_adapters({handle: scale for handle, scale in scales.items() if scale})
            expected = oracle.embed(PROMPT)
            for _ in range(2):  # the second time with what the prefix tree has
                found = engine.embed(PROMPT, mix, pooling=pooling, normalize=-1)
                assert found.values.dtype == np.float32
                assert found.values.shape == expected.shape
                assert nmse(found.values, expected) < BOUND
                assert found.n_prompt == len(PROMPT)
                assert {use.name for use in found.adapters} == set(mix)
            assert found.n_cached == (len(PROMPT) - 1 if pooling == "last" else 0)


def test_adapters_change_them(engine: Engine) -> None:
    """By far more than the bound."""
    base = engine.embed(PROMPT).values
    assert nmse(engine.embed(PROMPT, {"a": 1.0}).values, base) > 100 * BOUND


@pytest.mark.parametrize("lowering", ["routed", "stacked"])
def test_texts_and_embeddings_share_batches(shared: Model, setting: Setting, lowering: Any) -> None:
    """Each gets what it gets alone, in the same steps, with unlike adapters."""
    mixes: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 0.5}, {"a": 1.0, "b": -0.5}]
    with engine_of(shared, setting, lowering=lowering) as engine:
        texts = [engine.generate(PROMPT[i:], GREEDY, adapters=m) for i, m in enumerate(mixes)]
        alone = [engine.embed(PROMPT[i:], m).values for i, m in enumerate(mixes)]
        n_steps = engine.stats().core.n_steps

        async def main() -> list[Any]:
            tasks: list[Any] = []
            for i, mix in enumerate(mixes):
                salt = f"other {i}"
                request = Request(PROMPT[i:], mix, GREEDY, cache_salt=salt)
                tasks.append(engine.arun(request))
                tasks.append(engine.aembed(PROMPT[i:], mix, cache_salt=salt))
            return await asyncio.gather(*tasks)

        found = asyncio.run(main())
        assert engine.stats().core.n_steps - n_steps < 30
    assert [one.text for one in found[::2]] == [one.text for one in texts]
    for one, expected in zip(found[1::2], alone, strict=True):
        assert isinstance(one, Embedding)
        assert nmse(one.values, expected) < BOUND


@pytest.mark.parametrize("lowering", ["routed", "stacked"])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_adapters_on_the_head_meet_the_rows_with_logits(
    lowering: Any, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    """Scores beside embeddings, with unlike adapters on the head, are those without them."""
    tiny = TinyLlama(n_embd=128, n_ff=128, weight_type=kind)
    tiny.write(tmp_path / "m.gguf")
    for i in range(2):
        TinyAdapter(rank=3 + i, output=True, seed=i).write(tmp_path / f"{i}.gguf", tiny)
    paths = {str(i): tmp_path / f"{i}.gguf" for i in range(2)}
    mixes: list[dict[str, float]] = [{"0": 1.0}, {}, {"1": -1.0}, {"0": 0.5, "1": 1.0}]
    with Engine(tmp_path / "m.gguf", paths, n_ctx=1024, lowering=lowering, n_threads=1) as engine:
        makes = [
            partial(engine._jobs.make_score, Request(PROMPT[i:], mix), 1)
            for i, mix in enumerate(mixes)
        ]
        alone = [engine._client.answers([make])[0] for make in makes]
        embed = [
            partial(engine._jobs.make_embedding, Request(PROMPT[i:], mix), "mean", 2)
            for i, mix in enumerate(reversed(mixes))
        ]
        n_steps = engine.stats().core.n_steps
        mixed = engine._client.answers(
            [one for pair in zip(embed, makes, strict=True) for one in pair]
        )
        assert engine.stats().core.n_steps == n_steps + 1
    for one, other in zip(mixed[1::2], alone, strict=True):
        assert isinstance(one, Score)
        assert isinstance(other, Score)
        assert np.allclose(one.logprobs, other.logprobs, atol=0.02)


def test_no_head_is_computed_for_them(engine: Engine) -> None:
    """A step of embeddings alone has fewer nodes than one that ends in logits."""
    engine.embed(PROMPT[:20], pooling="last")
    without = engine.stats().runner.n_nodes
    engine.generate(PROMPT[:20], GREEDY, max_tokens=1, cache_salt="other")
    assert engine.stats().runner.n_nodes == without + 1


def test_graphs_of_texts_are_as_before(engine: Engine) -> None:
    """The same shape is computed by the graph that was kept before the embedding."""
    engine.generate(PROMPT[:20], GREEDY, max_tokens=1)
    engine.embed(PROMPT[:20], cache_salt="1")
    built = engine.stats().runner.n_graphs_built
    engine.generate(PROMPT[:20], GREEDY, max_tokens=1, cache_salt="2")
    assert engine.stats().runner.n_graphs_built == built


@pytest.mark.parametrize("p", [-1, 0, 1, 2, 3, 1024])
def test_norms(p: int) -> None:
    """The p-norm is 1; 0 scales to int16's range; -1 changes nothing; zeros stay zeros."""
    values = np.random.default_rng(1).standard_normal(64).astype(np.float32) * 1e3
    found = normalized(values, p).astype(np.float64)
    wide = np.abs(values.astype(np.float64))
    size = {-1: 1.0, 0: wide.max() / 32760}.get(p) or wide.max() * (
        (wide / wide.max()) ** p
    ).sum() ** (1 / p)
    assert np.allclose(found, values / size, rtol=1e-6)
    if p > 0:
        assert np.linalg.norm(found, p if p < 100 else np.inf) == pytest.approx(1, rel=1e-2)
    assert not normalized(np.zeros(4, np.float32), p).any()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("widths", [[5], [1, 1, 3], [0, 2, 3]])
def test_pooling_does_not_depend_on_the_steps(pooling: Any, widths: list[int]) -> None:
    """However the rows come, the result is the naive one."""
    states = np.random.default_rng(2).standard_normal((5, 8)).astype(np.float32)
    naive = {
        "mean": states.mean(axis=0, dtype=np.float64),
        "last": states[-1],
        "cls": states[0],
        "none": states,
    }
    pooled = PooledStates(pooling, -1)
    start = 0
    for width in widths:
        borrowed = states[start : start + width].copy()
        pooled.add(borrowed)
        borrowed[:] = np.nan
        start += width
    assert np.allclose(pooled.result(), naive[pooling], rtol=1e-6)


def test_wrong_arguments(engine: Engine) -> None:
    """Are refused by name; so are prompts that never fit."""
    for pooling in ("rank", None, ["mean"]):
        with pytest.raises(InvalidRequestError, match="pooling: expected one of"):
            engine.embed(PROMPT, pooling=pooling)  # type: ignore[arg-type]
    for normalize in (-2, 1025, 1.5, True, "2"):
        with pytest.raises(InvalidRequestError, match="normalize: expected an integer"):
            engine.embed(PROMPT, normalize=normalize)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError):
        engine.embed([1] * 1025)
    with pytest.raises(InvalidRequestError):
        engine.embed([])
    assert engine.embed([5]).n_prompt == 1


def test_preempted_prompts_and_states_that_are_not_finite() -> None:
    """Rows come once each after a preemption; a spoiled row ends its own request."""
    engine = FakeEngine(n_cells=160, block_size=8, max_batch_tokens=16)
    prompts = [[i, *range(40, 66)] for i in range(6)]
    texts = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
    pending = [
        engine.submit(prompt, max_tokens=0, states=PooledStates("none", 2)) for prompt in prompts
    ]
    engine.finish()
    assert engine.core.scheduler.n_preemptions > 0
    for prompt, one, text in zip(prompts, pending, texts, strict=True):
        fresh = FakeEngine()
        alone = fresh.submit(prompt, max_tokens=0, states=PooledStates("none", 2))
        fresh.finish()
        assert one.embedding.values.shape == (len(prompt), 4)
        assert np.array_equal(one.embedding.values, alone.embedding.values)
        assert text.result.text == FakeEngine().generate(prompt, max_tokens=40).text
    engine.check_idle()

    run = engine.runner.run

    def spoiled(batch: Any, *, copy: bool = True) -> Values:
        logits = run(batch, copy=copy)
        engine.runner.states[:1] = np.inf
        return logits

    engine.runner.run = spoiled  # type: ignore[method-assign]
    bad = engine.submit(prompts[0], max_tokens=0, states=PooledStates("mean", 2))
    good = engine.submit(prompts[1])
    engine.finish()
    assert isinstance(bad.error, BackendError)
    assert good.result.text == FakeEngine().generate(prompts[1]).text
    engine.check_idle()


@pytest.mark.slow
def test_of_a_real_model() -> None:
    """SmolLM2 with its table as head: the states are libllama's."""
    path = smollm_path()
    tokens = random_tokens(30)
    with Libllama(path, pooling="mean") as oracle, Engine(path, n_ctx=256) as engine:
        found = engine.embed(tokens, normalize=-1).values
        assert nmse(found, oracle.embed(tokens)) < 1e-3
