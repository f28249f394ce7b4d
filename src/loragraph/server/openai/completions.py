"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.request import Choice, Event, Result
from loragraph.errors import InvalidRequestError
from loragraph.server import sse
from loragraph.server.forms import grammar_of
from loragraph.server.gate import ApiKey, RequestId
from loragraph.server.mixes import RequestMix
from loragraph.server.openai.fields import CompletionBody
from loragraph.server.openai.logprobs import CompletionLogprobs, of_events, prompt_logprobs_json
from loragraph.server.openai.prepare import head, make_run, mix_of, wants_usage
from loragraph.server.prompts import TextPrompt, prompts_of
from loragraph.server.routing import api_router
from loragraph.server.runs import (
    Run,
    finish_all,
    merged_events,
    own_json,
    usage_json,
    while_connected,
)
from loragraph.server.sampling import sampling_params
from loragraph.server.state import ServerState, State

router = api_router(tags=["openai"])


@dataclass(frozen=True, slots=True)
class _Job:
    """All prompts of one request."""

    state: ServerState
    body: CompletionBody
    mix: RequestMix
    prompts: list[TextPrompt]
    runs: list[Run]
    n_logprobs: int | None

    @property
    def head(self) -> dict[str, Any]:
        return head("cmpl", "text_completion", self.runs[0].request_id, self.mix.model)


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, http: HttpRequest, state: State, request_id: RequestId, key: ApiKey
) -> Response:
    """What follows a prompt, or each of several, whole or as a stream of chunks."""
    job = await asyncio.to_thread(_prepare, state, body, request_id, key)
    if body.stream:
        return await sse.event_stream(
            _chunks(job),
            state.config.send_timeout_s,
            ping_s=state.config.ping_s(body.sse_ping_interval),
        )
    results = await while_connected(http, finish_all(job.runs))
    return JSONResponse(await asyncio.to_thread(_answer, job, results))


def _prepare(state: ServerState, body: CompletionBody, request_id: str, key: str) -> _Job:
    body.check()
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise InvalidRequestError(
            f"best_of: expected at least n, which is {n}, got {best_of}", param="best_of"
        )
    if best_of > n and body.stream:
        raise InvalidRequestError(
            "best_of: the best answers are known at the end, so they cannot be streamed",
            param="best_of",
        )
    n_logprobs = body.n_probs if body.logprobs is None else body.logprobs
    prompt_logprobs = body.prompt_logprobs
    if body.echo and n_logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = n_logprobs
    if body.stream and prompt_logprobs is not None:
        raise InvalidRequestError(
            "log-probabilities of the prompt are not supported in a stream", param="stream"
        )
    mix = mix_of(state, body, key)
    prompts = prompts_of(state, mix.defaults.prompts(body.prompt))
    params = sampling_params(
        state,
        body,
        grammar=grammar_of(body),
        defaults=mix.defaults.params({}),
        logprobs=0 if n_logprobs is None and best_of > n else n_logprobs,
    )
    runs = [
        make_run(
            state,
            body,
            mix,
            prompt.tokens,
            params,
            request_id,
            "completions",
            prompt_logprobs,
            n=best_of,
        )
        for prompt in prompts
    ]
    return _Job(state, body, mix, prompts, runs, n_logprobs)


def _answer(job: _Job, results: list[Result]) -> dict[str, Any]:
    choices = [
        _choice(job, number, result, choice)
        for number, result in enumerate(results)
        for choice in _best(result.choices, job.body.n or 1)
    ]
    answer = {**job.head, "choices": choices, "usage": usage_json(results)}
    own = [own_json(result) for result in results]
    # Those of several prompts are beside their choices.
    if len(own) == 1:
        return answer | own[0]
    for choice in choices:
        choice |= own[choice["index"] // (job.body.n or 1)]
    return answer


def _best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """The `n` best by the mean log-probability of their tokens, the best first.

    All in their order, where no more than `n` were generated. One without a token comes last.
    """
    if len(choices) <= n:
        return list(choices)

    def mean(choice: Choice) -> float:
        found = [one.logprob for one in choice.logprobs]
        return sum(found) / len(found) if found else -math.inf

    best = sorted(choices, key=mean, reverse=True)[:n]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


def _choice(job: _Job, number: int, result: Result, choice: Choice) -> dict[str, Any]:
    vocab = job.state.engine.model.vocab
    prompt = job.prompts[number]
    out: dict[str, Any] = {
        "index": number * (job.body.n or 1) + choice.index,
        "text": (prompt.text if job.body.echo else "") + choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_string if choice.stop_string else choice.stop_token,
    }
    if job.n_logprobs is not None:
        found: list[TokenLogprob | None] = list(choice.logprobs)
        tokens = list(choice.tokens)
        if job.body.echo:
            before = result.prompt_logprobs or (None,) * len(prompt.tokens)
            found, tokens = [*before, *found], [*prompt.tokens, *tokens]
        out["logprobs"] = CompletionLogprobs(vocab).of(found, tokens)
    if job.body.prompt_logprobs is not None:
        out["prompt_logprobs"] = prompt_logprobs_json(vocab, result.prompt_logprobs)
    if job.body.return_token_ids:
        out |= {"token_ids": list(choice.tokens), "prompt_token_ids": prompt.tokens}
    return out


class _ChoiceChunks:
    """One choice of a stream."""

    def __init__(self, job: _Job, index: int, prompt: TextPrompt, chunk: sse.Chunks) -> None:
        self._index = index
        self._text = prompt.text if job.body.echo else ""
        self._ids = bool(job.body.return_token_ids)
        self._logprobs = None
        if job.n_logprobs is not None:
            self._logprobs = CompletionLogprobs(job.state.engine.model.vocab)
        self._plain = self._logprobs is None and not self._ids
        self.form = chunk.form(self._entry(sse.MARK, None))

    def text(self, event: Event) -> str | None:
        """The text of an event that adds nothing but text, which is the case of nearly all."""
        return event.piece if self._plain and event.finish_reason is None else None

    def take_echo(self) -> str:
        """The prompt, where it is to be told before the first text."""
        echo, self._text = self._text, ""
        return echo

    def of(self, event: Event) -> dict[str, Any]:
        """The entry of `choices` that an event makes."""
        entry = self._entry(event.piece, event.finish_reason)
        if self._logprobs is not None:
            found = of_events([event])
            entry["logprobs"] = self._logprobs.of(found, [one.token for one in found])
        if self._ids:
            entry["token_ids"] = [] if event.token is None else [event.token]
        return entry

    def _entry(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": reason}


async def _chunks(job: _Job) -> AsyncGenerator[bytes, None]:
    chunk = sse.Chunks(job.head)
    n = job.body.n or 1
    choices = [
        _ChoiceChunks(job, number * n + index, prompt, chunk)
        for number, prompt in enumerate(job.prompts)
        for index in range(n)
    ]
    last: dict[str, Any] | None = None  # waits, so that it can tell what made the answer
    async for number, batch in merged_events(job.runs):
        out: list[bytes] = []  # an event a token, and all that are there in one piece
        for event in batch:
            choice = choices[number * n + event.index]
            echo = choice.take_echo()
            if echo:
                out.append(choice.form.of(echo))
            text = choice.text(event)
            if text is not None:
                if text:
                    out.append(choice.form.of(text))
                continue
            entry = choice.of(event)
            if entry["finish_reason"] is None:
                out.append(chunk.data(choices=[entry]))
                continue
            if last is not None:
                out.append(chunk.data(choices=[last]))
            last = entry
        if out:
            yield b"".join(out)
    results = [run.result for run in job.runs if run.result is not None]
    own = own_json(results[-1]) if len(results) == 1 else {}
    yield chunk.data(choices=[last], **own)
    if wants_usage(job.body):
        yield chunk.data(choices=[], usage=usage_json(results))
