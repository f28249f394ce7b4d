"""Generation: what is given out, when it ends, and what the context holds afterwards."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from loragraph import Context, GenerationEvent, Model, SamplingParams
from loragraph.engine.draw import ChainDraw
from loragraph.engine.generate import SamplingFields
from loragraph.errors import (
    ContextLengthError,
    InvalidRequestError,
    LifecycleError,
)
from tests.oracle.libllama import Libllama
from tests.smollm import smollm_path
from tests.tiny import TinyLlama

TINY = TinyLlama(seed=3)
EOG, END_OF_TURN = 2, 4  # </s> and <|im_end|> of the tiny vocabulary
NO_EOG = {EOG: -np.inf, END_OF_TURN: -np.inf}
PROMPT = "hello world"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("generate")
    TINY.write(folder / "base.gguf")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    """The tiny model, loaded."""
    with Model.load(folder / "base.gguf", n_threads=1) as model:
        yield model


@pytest.fixture
def ctx(model: Model) -> Iterator[Context]:
    """A context of 64 tokens."""
    with Context(model, n_ctx=64) as ctx:
        yield ctx


def text_of(model: Model, tokens: Sequence[int]) -> str:
    """The text that tokens stand for, decoded at once."""
    data = b"".join(model.vocab.piece(token, special=False) for token in tokens)
    return data.decode("utf-8", "replace")


def test_greedy_equals_libllama(ctx: Context, folder: Path) -> None:
    """Greedy tokens are libllama's, as far as its own choice is no matter of rounding."""
    tokens = ctx.model.vocab.tokenize(PROMPT)
    with Libllama(folder / "base.gguf", n_ctx=256) as oracle:
        logits = oracle.greedy_logits(tokens, 30)

    result = ctx.generate(PROMPT, temperature=0, max_tokens=30, logit_bias={})

    _assert_greedy(result.tokens, logits, stop=EOG, at_least=20)


@pytest.mark.slow
def test_greedy_equals_libllama_on_a_real_model() -> None:
    """SmolLM2's greedy answer in chat form is libllama's."""
    path = smollm_path()
    with Model.load(path, n_threads=1) as model, Context(model, n_ctx=256) as ctx:
        tokens = model.chat_tokens([{"role": "user", "content": "Count from 1 to 10."}])
        result = ctx.generate(tokens, temperature=0, max_tokens=16)
    with Libllama(path, n_ctx=256, flash=True) as oracle:
        logits = oracle.greedy_logits(tokens, 16)

    _assert_greedy(result.tokens, logits, stop=2, at_least=6)
    assert "2. 2" in result.text


def _assert_greedy(tokens: Sequence[int], logits: Any, stop: int, at_least: int) -> None:
    compared = 0
    for row in logits:
        second, first = np.sort(row)[-2:]
        if first - second < 0.05 or int(row.argmax()) == stop:
            break
        assert tokens[compared] == int(row.argmax())
        compared += 1
    assert compared >= at_least, "the oracle's choices are too close for a comparison"


def test_events(ctx: Context) -> None:
    """One event a token, a finish reason in the last alone, and the pieces are the text."""
    with ctx.stream(PROMPT, seed=5, max_tokens=12, logit_bias=NO_EOG) as stream:
        events = list(stream)
        result = stream.result

    assert len(events) == 12
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert tuple(event.token for event in events) == result.tokens
    assert "".join(event.piece for event in events) == result.text
    assert result.finish_reason == "length"
    assert result.n_generated == 12
    assert result.n_prompt == len(ctx.model.vocab.tokenize(PROMPT))
    assert (result.seed, result.stop_string, result.adapters) == (5, None, ())
    assert result.timings.n_decoded == 11
    assert result.timings.prompt_per_s > 0
    assert result.timings.decode_per_s > 0
    assert list(stream) == []


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_whole_characters(ctx: Context, seed: int) -> None:
    """Byte tokens never come out as halves of a character: the pieces join to the bytes' text."""
    only_bytes = dict.fromkeys((*range(5), *range(261, TINY.n_vocab)), -np.inf)
    with ctx.stream(
        PROMPT, seed=seed, temperature=2.0, top_k=0, min_p=0, max_tokens=40, logit_bias=only_bytes
    ) as stream:
        pieces = [event.piece for event in stream]

    assert "".join(pieces) == text_of(ctx.model, stream.result.tokens)


def test_characters_of_several_tokens(ctx: Context) -> None:
    """A character of n byte tokens appears whole, with the last of them."""
    grammar = 'root ::= "é€😀"'
    with ctx.stream(PROMPT, grammar=grammar, temperature=0) as stream:
        events = list(stream)

    assert [event.piece for event in events] == ["", "é", "", "", "€", "", "", "", "😀", ""]
    assert events[-1] == GenerationEvent("", EOG, "stop")
    assert stream.result.text == "é€😀"


def test_eog_ends_with_stop(ctx: Context) -> None:
    """The token that ends a generation is neither text nor one of the result's tokens."""
    result = ctx.generate(PROMPT, logit_bias={EOG: 1e4})

    assert (result.finish_reason, result.text, result.tokens) == ("stop", "", ())


def test_ignore_eos(ctx: Context) -> None:
    """With ignore_eos that token is never chosen."""
    result = ctx.generate(PROMPT, logit_bias={EOG: 1e3}, ignore_eos=True, max_tokens=20)

    assert (result.finish_reason, result.n_generated) == ("length", 20)


@pytest.mark.parametrize("stop", ["lo", ["zzz", "lo"], ("lo",)])
def test_stop_strings(ctx: Context, stop: str | Sequence[str]) -> None:
    """A stop string ends the text before itself and is named, however it is split into tokens."""
    result = ctx.generate(PROMPT, grammar='root ::= "abc hello abc"', temperature=0, stop=stop)

    assert (result.text, result.finish_reason, result.stop_string) == ("abc hel", "stop", "lo")
    assert text_of(ctx.model, result.tokens).startswith("abc hello")


def test_held_back_text_is_given_out_at_the_end(ctx: Context) -> None:
    """The beginning of a stop string that never came is text after all."""
    result = ctx.generate(PROMPT, grammar='root ::= "abc hel"', temperature=0, stop="hello")

    assert (result.text, result.finish_reason, result.stop_string) == ("abc hel", "stop", None)


def test_full_context_ends_with_length(ctx: Context) -> None:
    """Without max_tokens the context's end is the end; nothing overflows."""
    result = ctx.generate(PROMPT, logit_bias=NO_EOG, seed=1)

    assert result.finish_reason == "length"
    assert result.n_prompt + result.n_generated == ctx.n_ctx + 1  # the last one needs no place
    assert ctx.n_past == ctx.n_ctx


def test_prompt_that_fills_the_context(ctx: Context) -> None:
    """A prompt as long as the context is answered with one token, a longer one is refused."""
    result = ctx.generate([5] * 64, logit_bias=NO_EOG)
    assert (result.n_generated, result.finish_reason) == (1, "length")

    ctx.clear()
    with pytest.raises(ContextLengthError, match="at most 64 more tokens"):
        ctx.stream([5] * 65)
    assert ctx.n_past == 0


def test_max_tokens_zero(ctx: Context) -> None:
    """Zero tokens computes the prompt and gives one event without a token."""
    with ctx.stream(PROMPT, max_tokens=0) as stream:
        assert list(stream) == [GenerationEvent("", None, "length")]
    assert ctx.n_past == stream.result.n_prompt


def test_same_seed_same_text(ctx: Context) -> None:
    """A seed decides the text; without one, the seed in use is reported and can be given again."""

    def text(seed: int | None) -> tuple[str, int]:
        ctx.clear()
        result = ctx.generate(PROMPT, seed=seed, temperature=1.5, max_tokens=20, logit_bias=NO_EOG)
        return result.text, result.seed

    drawn, seed = text(None)

    assert text(seed) == (drawn, seed)
    assert text(1) == text(1)
    assert len({text(seed)[0] for seed in range(5)}) > 1


def test_continues_the_sequence(ctx: Context) -> None:
    """Two generations in a row are one: no token is lost or computed twice."""
    whole = ctx.generate(PROMPT, temperature=0, max_tokens=12, logit_bias=NO_EOG)
    ctx.clear()
    first = ctx.generate(PROMPT, temperature=0, max_tokens=5, logit_bias=NO_EOG)
    n_past = ctx.n_past
    second = ctx.generate("", temperature=0, max_tokens=7, logit_bias=NO_EOG)

    assert first.tokens + second.tokens == whole.tokens
    assert n_past == first.n_prompt + 5


def test_bos_only_at_the_beginning(ctx: Context) -> None:
    """A prompt that continues a sequence gets no second BOS."""
    first = ctx.generate("hello", max_tokens=1, logit_bias=NO_EOG)
    second = ctx.generate("hello", max_tokens=1, logit_bias=NO_EOG)

    assert first.n_prompt == second.n_prompt + 1


def test_decode_after_generate(ctx: Context) -> None:
    """decode() goes on from the generated tokens, and its rows are those of its own tokens."""
    result = ctx.generate([5, 6], temperature=0, max_tokens=3, logit_bias=NO_EOG)
    logits = ctx.decode([7, 8])
    ctx.clear()
    wanted = ctx.decode([5, 6, *result.tokens, 7, 8])

    assert logits.shape == (2, TINY.n_vocab)
    np.testing.assert_allclose(logits, wanted[-2:], rtol=0, atol=1e-2)


def test_truncate_drops_the_held_token(ctx: Context) -> None:
    """truncate() counts the last generated token like any other."""
    ctx.generate([5, 6], temperature=0, max_tokens=3, logit_bias=NO_EOG)
    assert ctx.n_past == 5
    ctx.truncate(4)
    assert ctx.n_past == 4
    with pytest.raises(InvalidRequestError, match="at least one token"):
        ctx.stream("")


def test_early_close(ctx: Context) -> None:
    """A stream left after three tokens harms nothing: the context holds these, and goes on."""
    wanted = ctx.generate(PROMPT, temperature=0, max_tokens=6, logit_bias=NO_EOG)
    ctx.clear()
    with ctx.stream(PROMPT, temperature=0, logit_bias=NO_EOG) as stream:
        for _ in range(3):
            next(stream)

    assert stream.result.finish_reason == "abort"
    assert stream.result.tokens == wanted.tokens[:3]
    assert list(stream) == []
    assert ctx.n_past == wanted.n_prompt + 3
    rest = ctx.generate("", temperature=0, max_tokens=3, logit_bias=NO_EOG)
    assert rest.tokens == wanted.tokens[3:]


def test_a_dropped_stream_frees_its_sampler(ctx: Context) -> None:
    """A stream that nobody closes is closed by its collection."""
    stream = ctx.stream(PROMPT, max_tokens=5)
    next(stream)
    sampler = stream._sampler
    del stream
    gc.collect()

    assert isinstance(sampler._draw, ChainDraw)
    with pytest.raises(LifecycleError, match="after its close"):
        _ = sampler._draw._filters.ptr


def test_never_started_stream(ctx: Context) -> None:
    """A stream without an event has computed nothing."""
    ctx.stream(PROMPT).close()

    assert ctx.n_past == 0


def test_changing_the_sequence_under_a_stream(ctx: Context) -> None:
    """A stream notices that its context was used for something else, and ends."""
    stream = ctx.stream(PROMPT, logit_bias=NO_EOG)
    next(stream)
    ctx.decode([5])

    with pytest.raises(LifecycleError, match="was changed while a generation read it"):
        next(stream)
    assert list(stream) == []


def test_closing_the_context_under_a_stream(model: Model) -> None:
    """After the context's close a stream raises instead of reading freed memory."""
    ctx = Context(model, n_ctx=64)
    stream = ctx.stream(PROMPT, logit_bias=NO_EOG)
    next(stream)
    ctx.close()

    with pytest.raises(LifecycleError, match="after its close"):
        next(stream)


def test_two_threads_on_one_stream(ctx: Context) -> None:
    """A stream read by a second thread raises there."""
    stream = ctx.stream(PROMPT, logit_bias=NO_EOG)
    errors: list[LifecycleError] = []

    def read() -> None:
        try:
            next(stream)
        except LifecycleError as error:
            errors.append(error)

    with stream._busy:  # as if the first thread were computing
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    assert "two threads at once" in str(errors[0])


NO_PROMPTS: list[Any] = [None, 5, b"text", {"role": "user"}, [[1, 2]], [[1], [2, 3]], [True]]
NO_PROMPTS += [[5, {}], [5, None], [5, "a"], [5, 2**70]]


@pytest.mark.parametrize(
    ("prompt", "fields", "match"),
    [
        ([], {}, "at least one token"),
        ([1.5], {}, "expected a text, token ids or messages"),
        *((wrong, {}, "expected a text, token ids or messages") for wrong in NO_PROMPTS),
        ([10**6], {}, "expected token ids from 0 to 319"),
        ([-1], {}, "expected token ids from 0 to 319"),
        ([{"role": "user"}], {}, "chat template"),
        ([{}], {}, "chat template"),
        ([5], {"chat": True}, "a text or a list of messages"),
        ([5], {"grammar": "root ::= ("}, "grammar"),
        ([5], {"grammar": "x"}, "grammar"),
        ([5], {"stop": ""}, "stop"),
        ([5], {"stop": [1]}, "stop"),
        ([5], {"temperature": float("nan")}, "temperature"),
        ([5], {"max_tokens": -1}, "max_tokens"),
        ([5], {"seed": -5}, "seed"),
        ([5], {"logit_bias": {10**6: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests(ctx: Context, prompt: Any, fields: Mapping[str, Any], match: str) -> None:
    """What a caller got wrong is said before anything is computed."""
    with pytest.raises(InvalidRequestError, match=match):
        ctx.stream(prompt, **fields)
    assert ctx.n_past == 0


def test_unknown_field(ctx: Context) -> None:
    """A misspelt field is a TypeError, as for any Python function."""
    with pytest.raises(TypeError, match="temp"):
        ctx.generate(PROMPT, temp=1.0)  # type: ignore[call-arg]


def test_fields_replace_those_of_params(ctx: Context) -> None:
    """Keyword arguments win over the SamplingParams given, the rest of which stays."""
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias=NO_EOG)

    assert ctx.generate(PROMPT, params).n_generated == 9
    assert ctx.generate(PROMPT, params, max_tokens=2).n_generated == 2


def test_fields_are_those_of_sampling_params() -> None:
    """The keyword arguments are exactly the fields of SamplingParams."""
    fields = [field.name for field in dataclasses.fields(SamplingParams)]

    assert sorted(get_type_hints(SamplingFields)) == sorted(fields)
