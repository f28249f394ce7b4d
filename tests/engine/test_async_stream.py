"""Streams in asyncio: order, coalescing, ends and cancellation."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from loragraph.engine.async_stream import Deliveries, Mailbox
from loragraph.engine.engine import Engine
from loragraph.engine.job import Job
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Event, Request
from loragraph.errors import (
    DeadlineError,
    InvalidRequestError,
    LifecycleError,
    ModelNotFoundError,
)
from tests.numerics.runs import random_tokens

PROMPT = random_tokens(30)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    """An engine of the test's own."""
    with Engine(model, n_ctx=1024) as engine:
        yield engine


def run(main: Coroutine[Any, Any, None]) -> None:
    """In a loop of its own; a hang is a failure."""
    asyncio.run(asyncio.wait_for(main, 60))


async def idle(engine: Engine) -> None:
    """Until nothing is left of any request."""
    while (await asyncio.to_thread(engine.stats)).core.n_jobs:
        await asyncio.sleep(0.01)


def test_batches_are_the_events_in_order(engine: Engine) -> None:
    """Lists, none empty, give what the stream for threads gives; then the result."""
    with engine.stream(PROMPT, GREEDY) as plain:
        expected = list(plain)

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=GREEDY)) as stream:
            assert stream.prompt_tokens == tuple(PROMPT)
            with pytest.raises(LifecycleError, match="before its end"):
                _ = stream.result
            found = [events async for events in stream.batches()]
            assert all(found)
            assert [event for events in found for event in events] == expected
            assert stream.result.tokens == plain.result.tokens
            assert [events async for events in stream.batches()] == []

    run(main())


def test_a_slow_reader_gets_all_at_once(engine: Engine) -> None:
    """What has come while it was busy is one list."""

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=GREEDY)) as stream:
            await idle(engine)
            (events,) = [events async for events in stream.batches()]
            assert len(events) == 12
            assert stream.result.finish_reason == "length"

    run(main())


def test_many_streams_cost_one_wake_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes for all streams of a loop leave in one call."""
    calls: list[Any] = []

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: calls.append(args))
    deliveries, boxes = Deliveries(), [Mailbox() for _ in range(5)]
    for box in boxes:
        deliveries.sink(loop, box)(Event(0, "a", 1))
        deliveries.sink(loop, box)(Event(0, "b", 2))
    deliveries.flush()
    deliveries.flush()
    ((deliver, by_box),) = calls
    assert list(by_box) == boxes
    deliver(by_box)
    assert [one.piece for one in loop.run_until_complete(boxes[0].take())] == ["a", "b"]  # type: ignore[union-attr]
    loop.close()


def test_a_closed_loop_harms_nobody(engine: Engine) -> None:
    """A request whose loop has ended runs to its end; others get theirs."""

    async def leave() -> None:
        await engine.asubmit(Request(PROMPT, params=GREEDY))

    run(leave())
    assert len(engine.generate(PROMPT, GREEDY).tokens) == 12


def test_loops_in_several_threads(engine: Engine) -> None:
    """Each gets its own events."""
    expected = engine.generate(PROMPT, GREEDY).text
    found: list[str] = []

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=GREEDY)) as stream:
            found.append("".join([event.piece async for event in stream]))

    threads = [threading.Thread(target=run, args=(main(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_leaving_the_stream_cancels(engine: Engine) -> None:
    """By leaving its block, by closing it twice, or by cancelling the task that reads it."""

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=LONG)) as stream:
            async for _ in stream.batches():
                break
        await idle(engine)
        stream.close()
        await stream.aclose()

        reading = await engine.asubmit(Request(PROMPT, params=LONG))
        task = asyncio.create_task(reading.wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert engine.stats().core.n_aborted == 2

    run(main())


def test_leaving_only_the_loop_goes_on(engine: Engine) -> None:
    """The rest can be read later."""

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=GREEDY)) as stream:
            found: list[Event] = []
            async for events in stream.batches():
                found += events
                break
            found += [event async for event in stream]
            assert len(found) == 12

    run(main())


def test_events_left_unread_are_read_later(engine: Engine) -> None:
    """Leaving the loop over events in the middle of what has come loses none."""

    async def main() -> None:
        async with await engine.asubmit(Request(PROMPT, params=GREEDY)) as stream:
            await idle(engine)
            found: list[Event] = []
            for n in (1, 4):
                async for event in stream:
                    found.append(event)
                    if len(found) >= n:
                        break
            async for events in stream.batches():
                found += events
            assert [one.token for one in found] == list(stream.result.tokens)

    run(main())


def test_what_is_wrong_raises_where_it_is_awaited(engine: Engine) -> None:
    """A wrong request at the submission, a deadline after the events before it."""

    async def main() -> None:
        with pytest.raises(ModelNotFoundError):
            await engine.asubmit(Request(PROMPT, {"nobody": 1.0}))
        with pytest.raises(InvalidRequestError):
            await engine.asubmit(Request([]))
        late = Request(PROMPT, params=LONG, deadline_s=0.05)
        async with await engine.asubmit(late) as stream:
            with pytest.raises(DeadlineError):
                await stream.wait()
            with pytest.raises(DeadlineError):
                _ = stream.result

    run(main())


def test_a_submission_cancelled_while_it_is_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frees what its thread makes after that."""
    made: list[Job] = []
    closed: list[Job] = []
    may_go_on = threading.Event()
    make = engine._jobs.make

    def slow(*args: Any, **options: Any) -> Job:
        may_go_on.wait(30)
        made.append(make(*args, **options))
        return made[0]

    def close(job: Job) -> None:
        closed.append(job)
        really_close(job)

    really_close = Job.close
    monkeypatch.setattr(engine._jobs, "make", slow)
    monkeypatch.setattr(Job, "close", close)

    async def main() -> None:
        task = asyncio.create_task(engine.asubmit(Request(PROMPT, params=LONG)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        while not closed:
            await asyncio.sleep(0.01)
        assert closed == made

    run(main())
    assert engine.stats().core.n_submitted == 0


def test_scores_and_batches_are_those_of_threads(engine: Engine) -> None:
    """In their order; a request that is wrong ends the others of its batch."""
    requests = [Request(PROMPT[:n], params=GREEDY) for n in (5, 9, 17)]
    expected = [one.tokens for one in engine.generate_batch(requests)]
    score = engine.score(PROMPT)

    async def main() -> None:
        found = await engine.agenerate_batch(requests)
        assert [one.tokens for one in found] == expected
        assert (await engine.ascore(PROMPT)).logprobs == pytest.approx(score.logprobs, abs=1e-4)
        wrong = Request(PROMPT, {"nobody": 1.0})
        with pytest.raises(ModelNotFoundError):
            await engine.agenerate_batch([Request(PROMPT, params=LONG), wrong])
        await idle(engine)
        batch = asyncio.create_task(engine.agenerate_batch([Request(PROMPT, params=LONG)] * 3))
        await asyncio.sleep(0.05)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await idle(engine)

    run(main())


def test_the_engine_closes_under_a_reader(model: Model) -> None:
    """Its request ends with LifecycleError."""

    async def main() -> None:
        engine = Engine(model, n_ctx=1024)
        stream = await engine.asubmit(Request(PROMPT, params=LONG))
        await anext(stream.batches())
        await asyncio.to_thread(engine.close)
        with pytest.raises(LifecycleError):
            await stream.wait()
        with pytest.raises(LifecycleError):
            await engine.asubmit(Request(PROMPT))

    run(main())


def test_clients_that_leave_at_random(engine: Engine) -> None:
    """Those that stay get their own text; nothing is held afterwards."""
    rng = random.Random(4)
    expected = {i: engine.generate(PROMPT[i:], GREEDY).text for i in range(5)}
    closed: set[Job] = set()
    really_close = Job.close

    def close(job: Job) -> None:
        closed.add(job)
        really_close(job)

    async def client(i: int, patience: int | None) -> None:
        pieces: list[str] = []
        async with await engine.asubmit(Request(PROMPT[i:], params=GREEDY, n=2)) as stream:
            async for events in stream.batches():
                pieces += [event.piece for event in events if event.index == 1]
                if patience is not None and len(pieces) > patience:
                    return
            assert "".join(pieces) == stream.result.choices[1].text == expected[i]

    async def main() -> None:
        tasks = []
        for _ in range(64):
            patience = rng.choice([None, None, 0, 3, 8])
            tasks.append(asyncio.create_task(client(rng.randrange(5), patience)))
            if rng.random() < 0.2:
                await asyncio.sleep(0.01)
                rng.choice(tasks).cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        await idle(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "close", close)
        run(main())
    stats = engine.stats()
    assert stats.scheduler.n_cells_in_use == stats.scheduler.n_running == 0
    assert len(closed) >= stats.core.n_submitted - len(expected)
    assert engine.sequences() == ()
