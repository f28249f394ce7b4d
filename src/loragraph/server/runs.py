"""One generation of the engine as a route has it: events or the result, cancelled when left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from loragraph.engine.async_stream import AsyncStream
from loragraph.engine.embedding import Pooling
from loragraph.engine.engine import Engine
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.request import Embedding, Event, Request, Result
from loragraph.errors import LoragraphError
from loragraph.server.errors import ApiError, fields_as_sent
from loragraph.server.mixes import RequestMix, uses_json
from loragraph.server.state import ServerState

T = TypeVar("T")


class Run:
    """A request to the engine. Belongs to the event loop; equality is identity."""

    def __init__(
        self,
        state: ServerState,
        request: Request,
        mix: RequestMix,
        request_id: str,
        route: str,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`route`: the path's last words, for logs and metrics; `names`: of fields_as_sent()."""
        self.state = state
        self.request = request
        self.mix = mix
        self.request_id = request_id
        self.route = route
        self.names = names or {}
        self.started = time.monotonic()
        self.first_event: float | None = None
        self.last_event: float | None = None
        self.ended: float | None = None
        self.n_events = 0  # tokens seen here; of a run without events, known from its result
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # from the first event
        self.result: Result | None = None
        self.embedding: Embedding | None = None  # of a run for one, in place of a result
        self.error: LoragraphError | None = None  # what ended it, if not its result
        self.cancelled = False  # left before its end
        self.stream: AsyncStream | None = None  # while events are read

    async def finish(self) -> Result:
        """Waits for the result; cancelling this cancels the request."""
        with self._watched() as engine:
            self.result = await engine.arun(self.request)
        return self.result

    async def embed(self, pooling: Pooling, normalize: int) -> Embedding:
        """The embedding of the request's prompt; cancelling this cancels it."""
        with self._watched() as engine:
            self.embedding = await engine.aembed_request(
                self.request, pooling=pooling, normalize=normalize
            )
        return self.embedding

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Batches of events, each of what came since the last; `result` is there after the end.

        Closing it cancels the request. However slowly it is read, the engine does not wait: what
        waits to be read is at most the answer.
        """
        with self._watched() as engine:
            async with await engine.asubmit(self.request) as stream:
                self.stream = stream
                while batch := await stream.batch():
                    self._note(batch)
                    yield batch
                self.result = stream.result

    @contextmanager
    def _watched(self) -> Iterator[Engine]:
        engine = self.state.accepting_engine
        self.state.runs[self] = None
        for hook in self.state.hooks:
            hook.on_start(self)
        try:
            with fields_as_sent(self.names):
                yield engine
        except LoragraphError as error:
            self.error = error
            raise
        finally:
            answered = self.result is not None or self.embedding is not None
            self.cancelled = not answered and self.error is None
            self.ended = time.monotonic()
            del self.state.runs[self]
            for hook in self.state.hooks:
                hook.on_end(self)

    def _note(self, batch: list[Event]) -> None:
        self.last_event = time.monotonic()
        if self.first_event is None:
            self.first_event = self.last_event
            self.prompt_logprobs = batch[0].prompt_logprobs
        for event in batch:
            if event.token is not None:
                self.n_events += 1


async def finish_all(runs: Sequence[Run]) -> list[Result]:
    """The results of several runs; see do_all()."""
    return await do_all(runs, lambda run: run.finish())


async def do_all(runs: Sequence[Run], work: Callable[[Run], Awaitable[T]]) -> list[T]:
    """What `work` gives of several runs, in their order. The first error, or leaving, ends all.

    Not more of them are in the engine at once than it computes, so that one request of many
    prompts does not fill its queue.
    """
    places = asyncio.Semaphore(_places(runs))

    async def finish(run: Run) -> T:
        async with places:
            return await work(run)

    tasks = [asyncio.ensure_future(finish(run)) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _ended(tasks)


async def merged_events(runs: Sequence[Run]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """The batches of several runs as they come, each with its run's place among them.

    An empty batch is a run's end: its result may be there before its last events were read here.
    """
    if len(runs) == 1:
        async with aclosing(runs[0].events()) as batches:
            async for batch in batches:
                yield 0, batch
        yield 0, []
        return
    places = asyncio.Semaphore(_places(runs))
    # Holds a batch a run at most: what else comes waits with its run, where batches join.
    merged: asyncio.Queue[tuple[int, list[Event]]] = asyncio.Queue(1)

    async def pump(number: int, run: Run) -> None:
        async with places, aclosing(run.events()) as batches:
            async for batch in batches:
                await merged.put((number, batch))
        await merged.put((number, []))

    tasks = [asyncio.ensure_future(pump(number, run)) for number, run in enumerate(runs)]
    running = set(tasks)
    try:
        n_open = len(runs)
        while n_open:
            getting = asyncio.ensure_future(merged.get())
            try:
                await asyncio.wait({getting, *running}, return_when=asyncio.FIRST_COMPLETED)
                while not getting.done():
                    ended = {task for task in running if task.done()}
                    running -= ended
                    for task in ended:
                        task.result()  # raises what went wrong
                    await asyncio.wait({getting, *running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                getting.cancel()
            number, batch = getting.result()
            n_open -= not batch
            yield number, batch
    finally:
        await _ended(tasks)


def _places(runs: Sequence[Run]) -> int:
    run = runs[0]
    return max(1, run.state.engine.config.max_sequences * 2 // run.request.n)


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(request: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled once the client is gone.

    To be used after the body was read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ApiError(499, "the client is gone")  # which only the log reads
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_json(results: list[Result]) -> dict[str, Any]:
    """OpenAI's `usage` of one or more requests; choices share their request's prompt."""
    n_prompt = sum(result.n_prompt for result in results)
    n_answer = sum(len(choice.tokens) for result in results for choice in result.choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": sum(result.n_cached for result in results)},
    }


def timings_json(result: Result | Embedding) -> dict[str, Any]:
    """llama-server's `timings`, with the time in the queue beside them."""
    timings = result.timings
    n_cached = result.n_cached
    n_prompt = result.n_prompt - n_cached
    choices = result.choices if isinstance(result, Result) else ()
    n_answer = sum(len(choice.tokens) for choice in choices)
    prompt_ms, predicted_ms = 1e3 * timings.prompt_s, 1e3 * timings.decode_s
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / n_prompt if n_prompt else 0.0,
        "prompt_per_second": 1e3 * n_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": n_answer,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / n_answer if n_answer else 0.0,
        "predicted_per_second": 1e3 * n_answer / predicted_ms if predicted_ms else 0.0,
        "queued_ms": 1e3 * timings.queued_s,
    }


def own_json(result: Result | Embedding) -> dict[str, Any]:
    """The fields that our answers have beside OpenAI's: `adapters` and `timings`."""
    return {"adapters": uses_json(result.adapters), "timings": timings_json(result)}
