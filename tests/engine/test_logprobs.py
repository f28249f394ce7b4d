"""Log-probabilities: against float64, of generated tokens and of prompts, in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.job import PromptScores
from loragraph.engine.logprobs import TokenLogprob, logprobs_of, token_logprobs
from loragraph.engine.model import Model
from loragraph.engine.params import MAX_LOGPROBS, SamplingParams
from loragraph.engine.request import Event, Request
from loragraph.errors import BackendError, InvalidRequestError
from tests.engine.fake_engine import FakeEngine
from tests.engine.setting import Setting
from tests.numerics.runs import random_tokens

PROMPT = random_tokens(40)
BOUND = 0.02  # of one logit: F16 cells, and products of other shapes
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """As written in a textbook, in f64."""
    wide = logits.astype(np.float64)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


@pytest.fixture(scope="module")
def engine(setting: Setting) -> Iterator[Engine]:
    """One engine for the module, with adapters a and b."""
    with setting.load() as model:
        adapters = dict(zip("ab", setting.paths, strict=True))
        with Engine(model, adapters, n_ctx=1024, max_batch_tokens=32) as engine:
            yield engine


def test_they_are_the_textbooks() -> None:
    """Tokens and their rivals, for more rows than are computed at once."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((70, 300)) * 9).astype(np.float32)
    tokens = rng.integers(0, 300, 70).tolist()
    n_top = [i % 5 for i in range(70)]
    expected = log_softmax(logits)
    assert np.allclose(logprobs_of(logits, tokens), expected[np.arange(70), tokens], atol=1e-6)
    for row, found in enumerate(token_logprobs(logits, tokens, n_top)):
        best = np.argsort(-logits[row], kind="stable")[: n_top[row]]
        assert found.token == tokens[row]
        assert found.logprob == pytest.approx(expected[row, tokens[row]], abs=1e-6)
        assert [token for token, _ in found.top] == best.tolist()
        assert np.allclose([value for _, value in found.top], expected[row, best], atol=1e-6)


def test_more_rivals_than_tokens_are_all_tokens() -> None:
    """A small vocabulary has no more."""
    (found,) = token_logprobs(np.zeros((1, 5), np.float32), [2], [MAX_LOGPROBS])
    assert [token for token, _ in found.top] == [0, 1, 2, 3, 4]
    assert found.logprob == pytest.approx(-np.log(5))


@pytest.mark.parametrize("mix", [{}, {"a": 1.0}, {"a": 0.5, "b": -1.0}], ids=repr)
def test_of_generated_tokens(engine: Engine, mix: dict[str, float]) -> None:
    """Those of the model's logits, before bias and temperature; events and choices agree."""
    params = SamplingParams(
        seed=1, temperature=2.0, max_tokens=8, logprobs=2, ignore_eos=True, logit_bias={7: 3.0}
    )
    with engine.stream(PROMPT, params, adapters=mix) as stream:
        events = list(stream)
    choice = stream.result.choices[0]
    assert choice.logprobs == tuple(
        TokenLogprob(one.token or 0, one.logprob or 0.0, one.top_logprobs) for one in events
    )
    tokens = [*PROMPT, *choice.tokens]
    with Context(engine.model, n_ctx=128) as context:
        with_scales = [
            (engine.model.load_adapter(engine.registry.resolve(name).path or ""), scale)
            for name, scale in mix.items()
        ]
        context.set_adapters(dict(with_scales))
        expected = log_softmax(context.decode(tokens))[len(PROMPT) - 1 :]
    for row, one in enumerate(choice.logprobs):
        assert one.logprob == pytest.approx(expected[row, one.token], abs=BOUND)
        assert len(one.top) == 2
        for token, value in one.top:
            assert value == pytest.approx(expected[row, token], abs=BOUND)


def test_the_low_level_stream_gives_them_too(engine: Engine) -> None:
    """The same values as the engine's, within the bound."""
    expected = engine.generate(PROMPT, GREEDY).choices[0].logprobs
    with Context(engine.model, n_ctx=128) as context:
        generation = context.generate(PROMPT, GREEDY)
    assert len(generation.logprobs) == len(generation.tokens) == 8
    for one, other in zip(generation.logprobs, expected, strict=True):
        if one.token != other.token:
            break  # a decision within the bound
        assert one.logprob == pytest.approx(other.logprob, abs=BOUND)


def test_nobody_else_gets_them(engine: Engine) -> None:
    """Requests that do not ask, in the same batch, have none."""
    wants = Request(PROMPT, params=GREEDY)
    plain = Request(PROMPT, params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    first, second = engine.generate_batch([wants, plain])
    assert len(first.choices[0].logprobs) == 8
    assert second.choices[0].logprobs == ()
    assert first.prompt_logprobs is None
    assert first.text == second.text


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_of_the_prompt(engine: Engine, max_tokens: int) -> None:
    """One for each token but the first, across steps, the same after a prefix hit; then text."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(PROMPT, {"a": 1.0}, params, prompt_logprobs=2)
    scores = engine.score(PROMPT, {"a": 1.0}).logprobs
    plain = engine.generate(PROMPT, params, adapters={"a": 1.0})
    for _ in range(2):
        result = engine.run(request)
        found = result.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [one.token for one in found[1:] if one] == PROMPT[1:]
        assert np.allclose([one.logprob for one in found[1:] if one], scores, atol=BOUND)
        assert all(one.top[0][1] >= one.logprob - BOUND for one in found[1:] if one)
        assert all(len(one.top) == 2 for one in found[1:] if one)
        assert result.n_cached == 0
        assert result.tokens == plain.tokens
        assert result.finish_reason == "length"


def test_every_form_gives_those_of_the_prompt(engine: Engine) -> None:
    """Whole, streamed, and in asyncio."""
    expected = engine.run(Request(PROMPT, None, GREEDY, prompt_logprobs=1)).prompt_logprobs
    with engine.stream(PROMPT, GREEDY, prompt_logprobs=1) as stream:
        list(stream)
    found = [
        engine.generate(PROMPT, GREEDY, prompt_logprobs=1),
        stream.result,
        asyncio.run(engine.agenerate(PROMPT, params=GREEDY, prompt_logprobs=1)),
    ]
    assert [one.prompt_logprobs for one in found] == [expected] * 3


def test_choices_share_the_prompts_logprobs(engine: Engine) -> None:
    """Only the first choice computes the whole prompt."""
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
    asked = Request(PROMPT, params=params, n=3, prompt_logprobs=0, cache_salt="own")
    plain = Request(PROMPT, params=params, n=3)
    result = engine.run(asked)
    assert [one.tokens for one in result.choices] == [
        one.tokens for one in engine.run(plain).choices
    ]
    assert [one.n_cached for one in result.choices] == [0, 39, 39]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_the_first_event_has_those_of_the_prompt(engine: Engine, max_tokens: int) -> None:
    """Though other choices find the prompt in the tree, and so have their first token earlier."""
    params = SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True)
    engine.run(Request(PROMPT, params=params))
    with engine.stream(PROMPT, params, n=3, prompt_logprobs=1) as stream:
        events = list(stream)
    expected = stream.result.prompt_logprobs

    assert events[0].index == 0
    assert events[0].prompt_logprobs == expected
    assert expected is not None
    assert all(event.prompt_logprobs is None for event in events[1:])
    for choice in stream.result.choices:
        own = [event for event in events if event.index == choice.index]
        assert "".join(event.piece for event in own) == choice.text
        assert [event.finish_reason is None for event in own].index(False) == len(own) - 1


def test_a_prompt_of_one_token(engine: Engine) -> None:
    """Has no log-probability to tell."""
    result = engine.run(Request([5], params=GREEDY, prompt_logprobs=1))
    assert result.prompt_logprobs == (None,)
    assert len(result.tokens) == 8


def test_of_a_preempted_prompt() -> None:
    """With too few cells the values come once each, in order."""
    engine = FakeEngine(n_cells=160, block_size=8, max_batch_tokens=16)
    prompts = [[i, *range(40, 66)] for i in range(8)]
    pending = [
        engine.submit(prompt, max_tokens=40, prompt_scores=PromptScores(1, 1)) for prompt in prompts
    ]
    engine.finish()
    assert engine.core.scheduler.n_preemptions > 0
    for prompt, one in zip(prompts, pending, strict=True):
        alone = FakeEngine().generate(prompt, max_tokens=40, prompt_scores=PromptScores(1, 1))
        assert one.result.text == alone.text
        assert one.result.prompt_logprobs == alone.prompt_logprobs
        assert [found.token for found in one.result.prompt_logprobs or () if found] == prompt[1:]
    engine.check_idle()


def test_of_an_aborted_prompt() -> None:
    """What was computed until then."""
    engine = FakeEngine(max_batch_tokens=8)
    pending = engine.submit(range(30), prompt_scores=PromptScores(1, 0))
    engine.step()
    engine.core.abort(pending.job)
    found = pending.result.prompt_logprobs
    assert found is not None
    assert len(found) == 9
    engine.check_idle()


def test_logits_that_are_not_finite_end_the_request() -> None:
    """And nobody else's."""
    engine = FakeEngine()
    run = engine.runner.run

    def spoiled(batch: object, *, copy: bool = True) -> npt.NDArray[np.float32]:
        logits = run(batch, copy=copy)  # type: ignore[arg-type]
        logits[3:4] = np.nan
        return logits

    engine.runner.run = spoiled  # type: ignore[method-assign]
    bad = engine.submit(range(30), prompt_scores=PromptScores(1, 2))
    good = engine.submit(range(40, 50))
    engine.finish()
    assert isinstance(bad.error, BackendError)
    assert good.result.text == FakeEngine().generate(range(40, 50)).text
    engine.check_idle()


def test_the_token_that_ends_has_one_too(engine: Engine) -> None:
    """Its event carries it, the choice's tokens and log-probabilities do not."""
    (token,) = engine.generate(PROMPT, GREEDY, max_tokens=1).tokens
    params = SamplingParams(temperature=0, stop_token_ids=(token,), logprobs=0)
    with engine.stream(PROMPT, params) as stream:
        (event,) = list(stream)
    assert event == Event(0, "", token, "stop", event.logprob)
    assert event.logprob is not None
    choice = stream.result.choices[0]
    assert (choice.tokens, choice.logprobs, choice.stop_token) == ((), (), token)


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, True, "3", 1.5])
def test_wrong_numbers(model: Model, value: object) -> None:
    """Of rivals: refused by name."""
    with Engine(model, n_ctx=64) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.run(Request([1, 2], prompt_logprobs=value))  # type: ignore[arg-type]
        assert caught.value.param == "prompt_logprobs"
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logprobs=value)  # type: ignore[arg-type]
    assert caught.value.param == "logprobs"
