"""One generation of the engine as a route has it: events or the result, cancelled when left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from loragraph.engine.request import Event, Request, Result
from loragraph.errors import LoragraphError
from loragraph.server.errors import ApiError
from loragraph.server.mixes import RequestMix, uses_json
from loragraph.server.state import ServerState

T = TypeVar("T")


class Run:
    """A request to the engine. Belongs to the event loop; equality is identity."""

    def __init__(
        self, state: ServerState, request: Request, mix: RequestMix, request_id: str, route: str
    ) -> None:
        """`route`: the path's last words, for logs and metrics."""
        self.state = state
        self.request = request
        self.mix = mix
        self.request_id = request_id
        self.route = route
        self.started = time.monotonic()
        self.first_event: float | None = None
        self.last_event: float | None = None
        self.ended: float | None = None
        self.n_events = 0  # tokens seen here; of a run without events, known from its result
        self.result: Result | None = None
        self.error: LoragraphError | None = None  # what ended it, if not its result
        self.cancelled = False  # left before its end

    async def finish(self) -> Result:
        """Waits for the result; cancelling this cancels the request."""
        async with aclosing(self._batches(events=False)) as batches:
            async for _ in batches:
                pass
        assert self.result is not None
        return self.result

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Batches of events, each of what came since the last; `result` is there after the end.

        Closing it cancels the request. However slowly it is read, the engine does not wait.
        """
        async with aclosing(self._batches(events=True)) as batches:
            async for batch in batches:
                yield batch

    async def _batches(self, *, events: bool) -> AsyncGenerator[list[Event], None]:
        engine = self.state.accepting_engine
        self.state.runs[self] = None
        for hook in self.state.hooks:
            hook.on_start(self)
        try:
            if not events:
                self.result = await engine.arun(self.request)
                return
            async with await engine.asubmit(self.request) as stream:
                async for batch in stream.batches():
                    self._note(batch)
                    yield batch
                self.result = stream.result
        except LoragraphError as error:
            self.error = error
            raise
        finally:
            self.cancelled = self.result is None and self.error is None
            self.ended = time.monotonic()
            del self.state.runs[self]
            for hook in self.state.hooks:
                hook.on_end(self)

    def _note(self, batch: list[Event]) -> None:
        now = time.monotonic()
        if self.first_event is None:
            self.first_event = now
        self.last_event = now
        self.n_events += sum(event.token is not None for event in batch)


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
            raise ApiError(400, "the client is gone")  # which nobody reads
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


def timings_json(result: Result) -> dict[str, Any]:
    """llama-server's `timings`, with the time in the queue beside them."""
    timings = result.timings
    n_cached = result.n_cached
    n_prompt = result.n_prompt - n_cached
    n_answer = sum(len(choice.tokens) for choice in result.choices)
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


def own_json(result: Result) -> dict[str, Any]:
    """The fields that our answers have beside OpenAI's: `adapters` and `timings`."""
    return {"adapters": uses_json(result.adapters), "timings": timings_json(result)}
