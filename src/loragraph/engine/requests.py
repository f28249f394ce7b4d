"""What an engine is asked for: texts, streams, scores, embeddings; for threads and asyncio."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from loragraph.engine.async_stream import AsyncStream
from loragraph.engine.client import Client
from loragraph.engine.embedding import Pooling
from loragraph.engine.generate import Prompt, SamplingFields, sampling_params
from loragraph.engine.handle import EngineStream
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Embedding, Event, Request, Result, Score


class EngineRequests(ABC):
    """Everything of `Engine` that asks it for something."""

    _client: Client
    _jobs: JobMaker

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapters: Mapping[str, float] | None = None,
        n: int = 1,
        deadline_s: float | None = None,
        cache_salt: str = "",
        chat: bool = False,
        prompt_logprobs: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Result:
        """Generates to the end. `prompt`: a text, token ids or chat messages.

        `fields` are those of SamplingParams and replace those of `params`. Raises what is wrong
        with the request, OverloadedError where too many wait, DeadlineError (with what there is),
        and what failed in the engine.
        """
        chosen = sampling_params(params, fields)
        request = Request(
            prompt, adapters, chosen, n, cache_salt, deadline_s, chat, prompt_logprobs
        )
        return self.run(request)

    def run(self, request: Request) -> Result:
        """Generates to the end; see generate()."""
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """Generates all; they enter the engine together. The first error ends the others."""
        self._check_open()
        return self._client.run_all(requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapters: Mapping[str, float] | None = None,
        n: int = 1,
        deadline_s: float | None = None,
        cache_salt: str = "",
        chat: bool = False,
        prompt_logprobs: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> EngineStream:
        """An iterator of events; closing it, or leaving its `with`, cancels the request.

        Arguments as for generate(). What is wrong with the request raises here, the rest while it
        is read.
        """
        chosen = sampling_params(params, fields)
        request = Request(
            prompt, adapters, chosen, n, cache_salt, deadline_s, chat, prompt_logprobs
        )
        return self.open(request)

    def open(self, request: Request) -> EngineStream:
        """A stream of a request's events; see stream()."""
        self._check_open()
        return self._client.open(request)

    async def asubmit(self, request: Request) -> AsyncStream:
        """open() for asyncio: nothing in it blocks the event loop, long prompts neither."""
        self._check_open()
        return await self._client.submit(partial(self._jobs.make, request, wants_events=True))

    async def arun(self, request: Request) -> Result:
        """run() for asyncio; cancelling the task cancels the request."""
        self._check_open()
        answer = await self._client.answer(partial(self._jobs.make, request))
        assert isinstance(answer, Result)
        return answer

    async def agenerate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """generate_batch() for asyncio; cancelling the task cancels the requests."""
        tasks = [asyncio.ensure_future(self.arun(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error, or a cancellation, ends the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def agenerate(self, prompt: Prompt, **options: Any) -> Result:
        """generate() for asyncio; cancelling the task cancels the request."""
        return await self.arun(_request(prompt, options))

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Event]:
        """stream() for asyncio; closing the iterator cancels the request."""
        async with await self.asubmit(_request(prompt, options)) as stream:
            async for event in stream:
                yield event

    def score(
        self,
        prompt: Prompt,
        adapters: Mapping[str, float] | None = None,
        *,
        start: int = 1,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Score:
        """Log-probabilities of the tokens from `start` on, each given those before it."""
        self._check_open()
        request = Request(prompt, adapters, cache_salt=cache_salt, deadline_s=deadline_s)
        (answer,) = self._client.answers([partial(self._jobs.make_score, request, start)])
        assert isinstance(answer, Score)
        return answer

    async def ascore(
        self,
        prompt: Prompt,
        adapters: Mapping[str, float] | None = None,
        *,
        start: int = 1,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Score:
        """score() for asyncio; cancelling the task cancels the request."""
        self._check_open()
        request = Request(prompt, adapters, cache_salt=cache_salt, deadline_s=deadline_s)
        answer = await self._client.answer(partial(self._jobs.make_score, request, start))
        assert isinstance(answer, Score)
        return answer

    def embed(
        self,
        prompt: Prompt,
        adapters: Mapping[str, float] | None = None,
        *,
        pooling: Pooling = "mean",
        normalize: int = 2,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Embedding:
        """What the prompt's tokens are in the last layer, after the final norm; as llama.cpp's.

        `pooling`: the mean of all, the last, the first ("cls") or all of them ("none").
        `normalize` p divides by the p-norm (2: Euclidean), 0 scales to the range of int16, -1
        changes nothing; with pooling "none" nothing is changed either. Embeddings and texts share
        batches, and "last" uses the prefix tree.
        """
        self._check_open()
        request = Request(prompt, adapters, cache_salt=cache_salt, deadline_s=deadline_s)
        make = partial(self._jobs.make_embedding, request, pooling, normalize)
        (answer,) = self._client.answers([make])
        assert isinstance(answer, Embedding)
        return answer

    async def aembed(
        self,
        prompt: Prompt,
        adapters: Mapping[str, float] | None = None,
        *,
        pooling: Pooling = "mean",
        normalize: int = 2,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Embedding:
        """embed() for asyncio; cancelling the task cancels the request."""
        request = Request(prompt, adapters, cache_salt=cache_salt, deadline_s=deadline_s)
        return await self.aembed_request(request, pooling=pooling, normalize=normalize)

    async def aembed_request(
        self, request: Request, *, pooling: Pooling = "mean", normalize: int = 2
    ) -> Embedding:
        """aembed() of a request; its `params`, `n` and `prompt_logprobs` mean nothing."""
        self._check_open()
        make = partial(self._jobs.make_embedding, request, pooling, normalize)
        answer = await self._client.answer(make)
        assert isinstance(answer, Embedding)
        return answer

    @abstractmethod
    def _check_open(self) -> None:
        """LifecycleError where nothing can be asked."""


def _request(prompt: Prompt, options: dict[str, Any]) -> Request:
    """A request from the keyword arguments of generate()."""
    names = ("adapters", "n", "cache_salt", "deadline_s", "chat", "prompt_logprobs")
    own = {name: options.pop(name) for name in names if name in options}
    params: SamplingParams | None = options.pop("params", None)
    return Request(prompt, params=sampling_params(params, options), **own)  # type: ignore[arg-type]
