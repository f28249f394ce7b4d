"""Several runs of one request, and streams that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import pytest

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request, Result
from loragraph.errors import BackendError, ContextLengthError, OverloadedError
from loragraph.server import sse
from loragraph.server.errors import ApiError
from loragraph.server.mixes import RequestMix
from loragraph.server.runs import Run, finish_all, merged_events
from tests.server.serving import Served

T = TypeVar("T")


def run_of(served: Served, prompt: list[int], n: int = 1, **fields: Any) -> Run:
    """A run of a few greedy tokens."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields})
    request = Request(prompt, {"alpha": 1.0}, params, n)
    return Run(served.state, request, RequestMix("base", {"alpha": 1.0}), "req-1", "completions")


def do(work: Awaitable[T]) -> T:
    """Runs it on an event loop of its own."""

    async def main() -> T:
        return await work

    return asyncio.run(main())


class Hooks:
    """Counts who starts and who ends how."""

    def __init__(self) -> None:
        self.started: list[Run] = []
        self.ended: list[Run] = []

    def on_start(self, run: Run) -> None:
        """One more."""
        self.started.append(run)

    def on_end(self, run: Run) -> None:
        """One less."""
        self.ended.append(run)


@pytest.fixture
def hooks(served: Served) -> Any:
    """Hooks of the server, for one test; every run that started has ended."""
    hooks = Hooks()
    served.state.hooks.append(hooks)
    yield hooks
    served.state.hooks.remove(hooks)
    assert set(hooks.started) == set(hooks.ended)
    assert not served.state.runs
    assert served.engine.stats().core.n_jobs == 0


def test_results_are_in_the_order_of_the_runs(served: Served, hooks: Hooks) -> None:
    """Many more runs than the engine has seats, each with its own result."""
    runs = [run_of(served, [5 + i, 6]) for i in range(40)]

    results = do(finish_all(runs))

    alone = [served.engine.run(run.request) for run in runs]
    assert [result.text for result in results] == [result.text for result in alone]
    assert all(run.result is result for run, result in zip(runs, results, strict=True))
    assert len(hooks.ended) == 40


def test_the_first_error_ends_all(served: Served, hooks: Hooks) -> None:
    """One run that is refused takes the others with it."""
    runs = [run_of(served, [5], max_tokens=900) for _ in range(3)]
    runs.insert(1, run_of(served, [5] * 3000))

    with pytest.raises(ContextLengthError):
        do(finish_all(runs))

    assert [run.error is not None for run in runs].count(True) == 1


def test_merged_events_are_those_of_each_run(served: Served, hooks: Hooks) -> None:
    """Batches of several runs come mixed, an empty one at each end; together they are the texts."""
    runs = [run_of(served, [7 + i], n=2) for i in range(3)]
    ended: list[int] = []

    async def collect() -> dict[tuple[int, int], str]:
        texts: dict[tuple[int, int], str] = {}
        async for number, batch in merged_events(runs):
            assert number not in ended
            if not batch:
                assert runs[number].result is not None
                ended.append(number)
            for event in batch:
                key = number, event.index
                texts[key] = texts.get(key, "") + event.piece
        return texts

    texts = do(collect())

    assert sorted(ended) == [0, 1, 2]
    for number, run in enumerate(runs):
        assert isinstance(run.result, Result)
        for choice in run.result.choices:
            assert texts[number, choice.index] == choice.text


def test_leaving_merged_events_ends_all(served: Served, hooks: Hooks) -> None:
    """Whoever stops reading cancels every run."""
    runs = [run_of(served, [7 + i], max_tokens=900) for i in range(3)]

    async def read_one() -> None:
        events = merged_events(runs)
        await anext(events)
        await events.aclose()

    do(read_one())

    assert all(run.cancelled for run in runs)


def test_an_error_among_merged_events(served: Served, hooks: Hooks) -> None:
    """It is raised, and the others end."""
    runs = [run_of(served, [7], max_tokens=900), run_of(served, [7] * 3000)]

    async def read_all() -> None:
        async for _ in merged_events(runs):
            pass

    with pytest.raises(ContextLengthError):
        do(read_all())


async def _chunks(error: Exception | None, n: int) -> AsyncGenerator[bytes, None]:
    for i in range(n):
        yield sse.data({"i": i})
    if error is not None:
        raise error


async def _sent(chunks: AsyncGenerator[bytes, None]) -> bytes:
    """The body of an event stream whose client stays."""
    response = await sse.event_stream(chunks, 5.0)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    await response({"type": "http"}, receive, send)
    return b"".join(sent)


@pytest.mark.parametrize(
    ("error", "code"), [(OverloadedError("full"), 429), (BackendError("x"), 500),
                        (ApiError(404, "gone"), 404)]
)  # fmt: skip
def test_an_error_within_a_stream_is_an_event(error: Exception, code: int) -> None:
    """Before the first chunk it is raised, so that it gets its own status."""
    body = do(_sent(_chunks(error, 2)))

    assert body.startswith(b'data: {"i":0}\n\ndata: {"i":1}\n\ndata: {"error":')
    assert b'"code":%d' % code in body
    assert body.endswith(b"data: [DONE]\n\n")
    with pytest.raises(type(error)):
        do(_sent(_chunks(error, 0)))


def test_a_client_that_does_not_read_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """After its time the stream ends without a last word, and the generator is closed."""
    closed = []

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            for i in range(100):
                yield sse.data(i)
        finally:
            closed.append(True)

    async def main() -> None:
        response = await sse.event_stream(chunks(), 0.05)

        async def send(message: Any) -> None:
            if b"3" in message.get("body", b""):
                await asyncio.sleep(60)

        async def receive() -> Any:
            await asyncio.sleep(60)

        await response({"type": "http"}, receive, send)

    asyncio.run(main())

    assert closed == [True]
    assert "read nothing" in caplog.text


def test_texts_with_half_a_surrogate_pair() -> None:
    """They are sent with a question mark; numbers that are not finite are null."""
    assert sse.data({"a": "x\ud800é"}) == 'data: {"a":"x?é"}\n\n'.encode()
    assert sse.data({"a": float("inf")}) == b'data: {"a":null}\n\n'
    assert sse.Chunks({"a": 1}).data(b=2) == b'data: {"a":1,"b":2}\n\n'
