"""What ends a choice, on a runner without a model."""

from __future__ import annotations

from loragraph.engine.params import SamplingParams
from tests.engine.fake_engine import GREEDY, FakeEngine

PROMPT = list(range(40, 70))


def test_a_stop_token_ends_without_being_text() -> None:
    """As the end of generation does; others in the batch go on."""
    engine = FakeEngine()
    free = engine.generate(PROMPT, max_tokens=12)
    stop = free.tokens[5]
    n = free.tokens.index(stop)
    params = SamplingParams(temperature=0, stop_token_ids=(stop,))
    pending = [engine.submit(PROMPT, max_tokens=12, params=one) for one in (params, GREEDY)]
    engine.finish()
    stopped, going_on = (one.result for one in pending)
    assert stopped.tokens == free.tokens[:n]
    assert (stopped.finish_reason, stopped.choices[0].stop_token) == ("stop", stop)
    assert going_on.text == free.text
    engine.check_idle()


def test_a_stop_tokens_text_stands_at_the_end_where_it_is_wanted() -> None:
    """include_stop_str_in_output: in the result and in its last event, but not in the tokens."""
    free = FakeEngine().generate(PROMPT, max_tokens=12)
    stop = free.tokens[5]
    n = free.tokens.index(stop)
    engine = FakeEngine()
    params = SamplingParams(temperature=0, stop_token_ids=(stop,), include_stop_str_in_output=True)
    pending = engine.submit(PROMPT, max_tokens=12, params=params)
    engine.finish()

    assert pending.result.text == free.text[: n + 1]
    assert pending.result.tokens == free.tokens[:n]
    engine.check_idle()


def test_stop_strings_wait_for_min_tokens() -> None:
    """One that is complete with fewer tokens is text; the next one ends it."""
    free = FakeEngine().generate(PROMPT, max_tokens=40)
    stop = free.text[3]
    places = [i for i, char in enumerate(free.text) if char == stop]

    def text(min_tokens: int) -> str:
        params = SamplingParams(temperature=0, stop=(stop,), min_tokens=min_tokens)
        return FakeEngine().generate(PROMPT, max_tokens=40, params=params).text

    assert text(0) == free.text[: places[0]]
    for min_tokens in range(1, 40):
        later = [i for i in places if i >= min_tokens]
        assert text(min_tokens) == (free.text[: later[0]] if later else free.text)
