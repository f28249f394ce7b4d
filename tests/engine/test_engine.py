"""The engine on a tiny model: against the low-level interface, from threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.pool import State
from loragraph.engine.request import Request, Result
from loragraph.errors import (
    AdapterChangedError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    LifecycleError,
    LoragraphError,
    ModelNotFoundError,
    OverloadedError,
)
from tests.numerics.compare import greedy_agreement
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyLlama

PROMPT = random_tokens(40)
X, Y = 301, 302
BOUND = 0.02  # of one logit: F16 cells, and products of other shapes
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


class Files:
    """A base, plain adapters a, b, c of unlike ranks, and an aLoRA."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny = TinyLlama()
        self.base = self.tiny.write(folder / "m.gguf")
        self.paths = {name: folder / f"{name}.gguf" for name in ("a", "b", "c", "alora")}
        for i, name in enumerate("abc"):
            TinyAdapter(rank=3 + i, seed=i + 1).write(self.paths[name], self.tiny)
        alora = TinyAdapter(rank=4, seed=9, invocation_tokens=[X, Y])
        alora.write(self.paths["alora"], self.tiny)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files, not to be written to."""
    return Files(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def model(files: Files) -> Iterator[Model]:
    """One model for the module."""
    with Model.load(files.base, n_threads=1) as model:
        yield model


@pytest.fixture
def engine(model: Model, files: Files) -> Iterator[Engine]:
    """An engine of the test's own, with all adapters."""
    with Engine(model, files.paths, n_ctx=1024) as engine:
        yield engine


class Oracle:
    """The low-level interface, one sequence at a time."""

    def __init__(self, model: Model, files: Files) -> None:
        self.context = Context(model, n_ctx=512)
        self.adapters = {name: model.load_adapter(path) for name, path in files.paths.items()}

    def logits(
        self, tokens: Sequence[int], parts: Sequence[tuple[int, Mapping[str, float]]]
    ) -> np.ndarray[Any, Any]:
        """Logits of all tokens; parts are (first token, names and scales)."""
        self.context.clear()
        out = []
        for i, (start, scales) in enumerate(parts):
            end = parts[i + 1][0] if i + 1 < len(parts) else len(tokens)
            self.context.set_adapters({self.adapters[n]: s for n, s in scales.items()})
            if start < end:
                out.append(self.context.decode(tokens[start:end]))
        return np.concatenate(out)

    def check(
        self,
        result: Result,
        prompt: Sequence[int],
        parts: Sequence[tuple[int, Mapping[str, float]]],
    ) -> None:
        """The greedy text agrees up to the first position that is undecided within the bound."""
        tokens = [*prompt, *result.tokens]
        logits = self.logits(tokens, parts)[len(prompt) - 1 : -1].copy()
        logits[:, 2] = -1e9  # the end, which the requests forbid
        expected = logits.argmax(axis=1).tolist()
        agreement = greedy_agreement(result.tokens, expected, logits, BOUND)
        assert agreement.agrees
        assert agreement.n_compared > 0


@pytest.fixture(scope="module")
def oracle(model: Model, files: Files) -> Iterator[Oracle]:
    """One context for the module."""
    oracle = Oracle(model, files)
    yield oracle
    oracle.context.close()


MIXES: list[dict[str, float]] = [
    {},
    {"a": 1.0},
    {"b": 1.0},
    {"a": 0.5, "b": -0.5},
    {"a": 1.0, "b": 0.25, "c": -1.0},
]


@pytest.mark.parametrize(
    ("attention", "lowering"), [("cells", "routed"), ("flash", "routed"), ("cells", "stacked")]
)
def test_a_mixed_batch_agrees_with_the_low_level_interface(
    attention: Any, lowering: Any, model: Model, files: Files, oracle: Oracle
) -> None:
    """Requests with unlike prompts and mixes, together: each as one sequence alone."""
    with Engine(model, files.paths, n_ctx=2048, attention=attention, lowering=lowering) as engine:
        requests = [Request(PROMPT[i:], mix, GREEDY) for i in range(3) for mix in MIXES]
        results = engine.generate_batch(requests)
        for request, result in zip(requests, results, strict=True):
            assert isinstance(request.prompt, list)
            oracle.check(result, request.prompt, [(0, request.adapters or {})])


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ([*PROMPT, X, Y, 5], 40),
        ([X, Y, *PROMPT], 0),
        ([*PROMPT, X, Y, Y], 40),
        ([*PROMPT, X], None),
    ],
    ids=["after a history", "at index 0", "overlapping", "absent"],
)
def test_an_alora_agrees_with_the_low_level_interface(
    prompt: list[int], start: int | None, engine: Engine, oracle: Oracle
) -> None:
    """The base before the invocation, the adapter from its first token on; base cells shared."""
    engine.generate(PROMPT, GREEDY)
    result = engine.generate(prompt, GREEDY, adapters={"alora": 1.0})
    parts: list[tuple[int, dict[str, float]]] = [(0, {})]
    if start is not None:
        parts.append((start, {"alora": 1.0}))
    oracle.check(result, prompt, parts)
    assert result.adapters[0].active_from == start
    assert result.n_cached == (len(PROMPT) if prompt[: len(PROMPT)] == PROMPT else 0)


def test_scores_agree_with_the_low_level_interface(engine: Engine, oracle: Oracle) -> None:
    """Log-probabilities of all tokens but the first, with adapters, also after a prefix hit."""
    logits = oracle.logits(PROMPT, [(0, {"a": 1.0})]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [logprobs[i, PROMPT[i + 1]] for i in range(len(PROMPT) - 1)]
    first = engine.score(PROMPT, {"a": 1.0})
    again = engine.score(PROMPT, {"a": 1.0}, start=10)
    assert np.allclose(first.logprobs, expected, atol=BOUND)
    assert np.allclose(again.logprobs, expected[9:], atol=BOUND)


def test_a_long_score_is_computed_in_chunks(model: Model, files: Files) -> None:
    """More tokens than a step holds give what one step gives."""
    tokens = random_tokens(100)
    with Engine(model, files.paths, max_batch_tokens=32, n_ctx=256) as small:
        chunked = small.score(tokens, {"b": 1.0}).logprobs
    with Engine(model, files.paths, n_ctx=256) as large:
        whole = large.score(tokens, {"b": 1.0}).logprobs
    assert np.allclose(chunked, whole, atol=BOUND)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mirostat": 1},
        {"mirostat": 2, "min_tokens": 5},
        {"xtc_probability": 0.5, "top_n_sigma": 2.0, "dry_multiplier": 1.0, "logprobs": 3},
        {"dynatemp_range": 0.5, "repeat_penalty": 1.2, "stop_token_ids": (7,), "typical_p": 0.9},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 0, "logit_bias": {7: 2.0}, "repeat_penalty": 1.3, "logprobs": 2},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.9, "min_tokens": 3},
    ],
    ids=repr,
)
def test_a_seed_gives_the_same_text_whatever_else_runs(
    engine: Engine, options: dict[str, Any]
) -> None:
    """Alone, and among others; n choices draw with seed, seed + 1, ..."""
    params = SamplingParams(seed=5, max_tokens=8, ignore_eos=True, **options)
    wanted = Request(PROMPT, {"a": 1.0}, params, n=3)
    alone = engine.run(wanted)
    others = [Request(PROMPT[i:], {"b": 1.0}, params) for i in range(6)]
    mixed = engine.generate_batch([*others[:3], wanted, *others[3:]])[3]
    assert [one.tokens for one in mixed.choices] == [one.tokens for one in alone.choices]
    if params.logprobs:  # what bias and penalties add for a choice stands in no other's logits
        first = [dict(one.logprobs[0].top) for one in alone.choices]
        assert first[1] == pytest.approx(first[0], abs=BOUND)
        assert first[2] == pytest.approx(first[0], abs=BOUND)
    assert [one.seed for one in alone.choices] == [5, 6, 7]
    single = engine.generate(PROMPT, params, adapters={"a": 1.0}, seed=6)
    assert single.tokens == alone.choices[1].tokens


def test_a_grammar_binds_one_request_of_a_batch(engine: Engine) -> None:
    """Its text is a sentence of the grammar; the others are as without it."""
    free = engine.generate(PROMPT, GREEDY).text
    bound = Request(PROMPT, params=SamplingParams(seed=1, grammar='root ::= "yes" | "no"'))
    results = engine.generate_batch([bound, Request(PROMPT, params=GREEDY)])
    assert results[0].text in ("yes", "no")
    assert results[1].text == free


def test_an_evicted_and_reloaded_adapter_gives_the_same_bits(model: Model, files: Files) -> None:
    """Without the prefix tree's help: another salt, the same log-probabilities."""
    with Engine(model, files.paths, n_ctx=512, max_adapters=1) as engine:
        first = engine.score(PROMPT, {"a": 1.0}, cache_salt="1")
        engine.score(PROMPT, {"b": 1.0})
        again = engine.score(PROMPT, {"a": 1.0}, cache_salt="2")
        assert np.array_equal(first.logprobs, again.logprobs)
        assert engine.stats().pool.n_evictions == 2


def test_a_file_overwritten_in_place_changes_nothing_that_runs(
    model: Model, files: Files, tmp_path: Path
) -> None:
    """The resident adapter stays; once evicted, the old generation ends with an error."""
    path = tmp_path / "a.gguf"
    path.write_bytes(files.paths["a"].read_bytes())
    paths = {"a": path, "b": files.paths["b"]}
    with Engine(model, paths, n_ctx=512, max_adapters=1) as engine:
        first = engine.score(PROMPT, {"a": 1.0}, cache_salt="1")
        path.write_bytes(files.paths["c"].read_bytes())
        second = engine.score(PROMPT, {"a": 1.0}, cache_salt="2")
        assert np.array_equal(first.logprobs, second.logprobs)
        engine.score(PROMPT, {"b": 1.0})
        with pytest.raises(AdapterChangedError, match="generation 1"):
            engine.score(PROMPT, {"a": 1.0})
        third = engine.score(PROMPT, {"a": 1.0})
        assert third.adapters[0].generation > 2
        assert third.adapters[0].digest != first.adapters[0].digest


def test_a_combined_adapter_does_what_its_mix_does(engine: Engine) -> None:
    """Any ranks, negative scales; by name, and gone when the name is unloaded."""
    mix = {"a": 0.7, "b": -0.3, "c": 1.0}
    expected = engine.score(PROMPT, mix).logprobs
    generation = engine.combine("all", mix)
    assert generation.header.rank_max == 3 + 4 + 5
    assert np.allclose(engine.score(PROMPT, {"all": 1.0}).logprobs, expected, atol=BOUND)
    assert engine.stats().pool.n_tickets == 0
    adapter = generation.adapter
    assert adapter is not None
    engine.unload_adapter("all")
    engine.stats()
    assert adapter.closed


def test_requests_from_many_threads(engine: Engine) -> None:
    """Each gets its own answer."""
    alone = [engine.generate(PROMPT[i:], GREEDY, adapters=MIXES[i % 5]).tokens for i in range(8)]
    found: dict[int, object] = {}

    def work(i: int) -> None:
        found[i] = engine.generate(PROMPT[i:], GREEDY, adapters=MIXES[i % 5]).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == alone


def test_a_stream_gives_the_text_in_pieces(engine: Engine) -> None:
    """Events, then the result; a choice's last event has the reason."""
    expected = engine.generate(PROMPT, GREEDY)
    with engine.stream(PROMPT, GREEDY) as stream:
        events = list(stream)
    assert "".join(event.piece for event in events) == expected.text == stream.result.text
    assert [event.finish_reason for event in events] == [None] * 9 + ["length"]


def test_closing_a_stream_cancels_its_request(engine: Engine) -> None:
    """Everything it held is free."""
    stream = engine.stream(PROMPT, adapters={"a": 1.0}, max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()
    stats = engine.stats()
    assert (stats.core.n_jobs, stats.scheduler.n_cells_in_use, stats.pool.n_tickets) == (0, 0, 0)
    assert list(stream) == []
    with pytest.raises(LifecycleError):
        _ = stream.result


def test_asyncio_forms(engine: Engine) -> None:
    """Many at once; a cancelled task cancels its request."""
    expected = [engine.generate(PROMPT, GREEDY, adapters=mix).text for mix in MIXES]

    async def pieces(mix: dict[str, float]) -> str:
        found = [e async for e in engine.astream(PROMPT, params=GREEDY, adapters=mix)]
        return "".join(event.piece for event in found)

    async def main() -> None:
        results = await asyncio.gather(
            *(engine.agenerate(PROMPT, params=GREEDY, adapters=mix) for mix in MIXES)
        )
        assert [result.text for result in results] == expected
        assert await asyncio.gather(*map(pieces, MIXES)) == expected
        task = asyncio.create_task(engine.agenerate(PROMPT, max_tokens=900, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.stats().core.n_jobs == 0


def test_a_deadline_ends_a_request_with_what_there_is(engine: Engine) -> None:
    """The error holds the result so far."""
    with pytest.raises(DeadlineError) as caught:
        engine.generate(PROMPT, max_tokens=900, ignore_eos=True, deadline_s=0.05)
    assert isinstance(caught.value.result, Result)
    assert caught.value.result.finish_reason == "abort"
    assert engine.stats().core.n_jobs == 0


def test_a_full_queue_refuses(model: Model, files: Files) -> None:
    """With status 429, and the others are served."""
    with Engine(model, max_waiting=2, max_sequences=1, n_ctx=512) as engine:
        with pytest.raises(OverloadedError) as caught:
            engine.generate_batch([Request(PROMPT, params=GREEDY)] * 8)
        assert caught.value.status == 429
        assert engine.generate(PROMPT, GREEDY).finish_reason == "length"


BAD_REQUESTS: dict[str, tuple[dict[str, Any], type[LoragraphError], str]] = {
    "unknown name": ({"adapters": {"z": 1.0}}, ModelNotFoundError, "known: a, alora, b, c"),
    "scale NaN": ({"adapters": {"a": float("nan")}}, InvalidRequestError, "finite scale"),
    "scale beyond f32": ({"adapters": {"a": 1e39}}, InvalidRequestError, "finite scale"),
    "scale is text": ({"adapters": {"a": "1"}}, InvalidRequestError, "finite scale"),
    "adapters is a list": ({"adapters": ["a"]}, InvalidRequestError, "names with scales"),
    "n 0": ({"n": 0}, InvalidRequestError, "n: expected"),
    "deadline 0": ({"deadline_s": 0}, InvalidRequestError, "deadline_s"),
    "no prompt": ({"prompt": []}, InvalidRequestError, "at least one token"),
    "token outside": ({"prompt": [320]}, InvalidRequestError, "token ids from 0 to 319"),
    "too long": ({"prompt": [5] * 2000}, ContextLengthError, "at most 1023"),
    "bad grammar": ({"grammar": "root ::= ("}, InvalidRequestError, "grammar"),
}


@pytest.mark.parametrize(("fields", "kind", "text"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_requests_are_refused_before_they_enter(
    fields: dict[str, Any], kind: type[LoragraphError], text: str, engine: Engine
) -> None:
    """With an error that says what was expected; nothing was submitted."""
    with pytest.raises(kind, match=text):
        engine.generate(**{"prompt": PROMPT, **fields})
    assert engine.stats().core.n_submitted == 0


def test_registering_reads_no_tensor(model: Model, files: Files, tmp_path: Path) -> None:
    """A cut file is refused by its header's bounds, a good one is not loaded."""
    with Engine(model, {"a": files.paths["a"]}, n_ctx=256) as engine:
        (row,) = engine.adapters
        assert (row.state, row.digest, row.rank_max) == (State.ABSENT, None, 3)
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(files.paths["a"].read_bytes()[:-5000])
        with pytest.raises(LoragraphError):
            engine.load_adapter("cut", cut)
        assert [row.name for row in engine.adapters] == ["a"]


def test_a_folder_of_adapters(model: Model, files: Files) -> None:
    """Its files are adapters by name, loaded on demand; the base among them is refused."""
    with Engine(model, adapter_dir=files.folder, n_ctx=256) as engine:
        assert [row.name for row in engine.adapters] == ["a", "alora", "b", "c", "m"]
        assert engine.generate(PROMPT, GREEDY, adapters={"a": 1.0}).adapters[0].name == "a"
        with pytest.raises(LoragraphError, match="adapter"):
            engine.generate(PROMPT, adapters={"m": 1.0})


def test_pins_keep_an_adapter_and_leave_less_room(model: Model, files: Files) -> None:
    """A pinned adapter stays through others; what cannot fit beside it is refused."""
    with Engine(model, files.paths, n_ctx=512, max_adapters=2) as engine:
        engine.pin("a")
        for name in "bcb":
            engine.generate(PROMPT, GREEDY, adapters={name: 1.0})
        states = {row.name: row.state for row in engine.adapters}
        assert states["a"] is State.RESIDENT
        with pytest.raises(CapacityError, match="unpin"):
            engine.generate(PROMPT, adapters={"b": 1.0, "c": 1.0})
        engine.unpin("a")
        assert engine.generate(PROMPT, GREEDY, adapters={"b": 1.0, "c": 1.0}).text


def test_closing_ends_or_drains(model: Model, files: Files) -> None:
    """With drain all requests end well, without they end with an error; then nothing works."""
    for drain in (True, False):
        engine = Engine(model, files.paths, n_ctx=512)
        stream = engine.stream(PROMPT, GREEDY, adapters={"a": 1.0}, max_tokens=100)
        next(stream)
        engine.close(drain=drain)
        engine.close()
        if drain:
            assert len(list(stream)) == 99
        else:
            with pytest.raises(LifecycleError, match="closed"):
                list(stream)
        with pytest.raises(LifecycleError):
            engine.generate(PROMPT)
        with pytest.raises(LifecycleError):
            engine.stats()
    users = [name for adapter in model.adapters for name in adapter.attached_to]
    assert "the engine" not in users


def test_closing_while_threads_submit_leaves_nobody_waiting(model: Model, files: Files) -> None:
    """Each request ends with a result or a LifecycleError."""
    engine = Engine(model, files.paths, n_ctx=512, max_adapters=1)
    outcomes: list[object] = []

    def work(i: int) -> None:
        for k in range(100):
            try:
                name = "abc"[(i + k) % 3]
                outcomes.append(engine.generate(PROMPT, GREEDY, adapters={name: 1.0}))
            except LifecycleError as error:
                outcomes.append(error)
                return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while len(outcomes) < 10:
        threads[0].join(0.01)
    engine.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert {type(one) for one in outcomes} == {Result, LifecycleError}


def test_an_adapter_given_in_memory_stays_the_callers(model: Model, files: Files) -> None:
    """The engine uses it and lets it go; another model's, or a closed one, is refused."""
    adapter = model.load_adapter(files.paths["a"])
    with Engine(model, {"mine": adapter}, n_ctx=256) as engine:
        engine.generate(PROMPT, GREEDY, adapters={"mine": 1.0})
        assert adapter.attached_to == ("the engine",)
        engine.load_adapter("too", adapter)
        both = engine.score(PROMPT, {"mine": 0.75, "too": 0.25}).logprobs
        assert np.array_equal(both, engine.score(PROMPT, {"mine": 1.0}).logprobs)
        engine.unload_adapter("mine")
        engine.unload_adapter("too")
        engine.stats()
        assert not adapter.attached_to
    assert not adapter.closed
    adapter.close()
    with (
        Engine(model, n_ctx=256) as engine,
        pytest.raises(LifecycleError, match="closed or registered with another"),
    ):
        engine.load_adapter("gone", adapter)


def test_chat_messages_are_a_prompt(engine: Engine) -> None:
    """Rendered by the file's template."""
    messages = [{"role": "user", "content": "hello"}]
    tokens = engine.model.chat_tokens(messages)
    assert engine.generate(messages, GREEDY).text == engine.generate(tokens, GREEDY).text


@pytest.mark.parametrize(
    "options",
    [{"lowering": "branch"}, {"max_adapters": 0}, {"n_ctx": 0}, {"max_batch_tokens": 8}],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], model: Model) -> None:
    """Before anything is made; the model can be closed afterwards."""
    contexts = set(model._contexts)
    with pytest.raises(ConfigError):
        Engine(model, **options)
    assert set(model._contexts) == contexts


def test_memory_stays_flat_over_many_requests(engine: Engine) -> None:
    """Counts of now are at their start values after requests of all kinds."""
    for i in range(20):
        engine.generate(PROMPT[i % 7 :], GREEDY, adapters=MIXES[i % 5], n=1 + i % 3)
    stats = engine.stats()
    assert stats.core.n_jobs == stats.scheduler.n_running == stats.scheduler.n_waiting == 0
    assert stats.scheduler.n_cells_in_use == stats.pool.n_tickets == stats.pool.n_in_use == 0
    assert stats.core.n_finished == stats.core.n_submitted == 20
