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
from loragraph.server.openai.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    of_events,
    prompt_logprobs_json,
)
from loragraph.server.openai.prepare import as_sent, head, id_of, make_run, mix_of, wants_usage
from loragraph.server.openai.stream import Fields, chunks
from loragraph.server.prompts import TextPrompt, prompts_of, truncated
from loragraph.server.routing import api_router
from loragraph.server.runs import Run, finish_all, own_json, usage_json, while_connected
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
    job = await asyncio.to_thread(
        as_sent, _prepare, state, body, id_of(http, body, request_id), key
    )
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
    n = body.n_choices
    best_of = body.best_of or n
    if best_of < n:
        raise InvalidRequestError(
            f"best_of: expected at least n, which is {n}, got {best_of}", param="best_of"
        )
    if best_of > n and body.stream:
        raise InvalidRequestError(
            "best_of: the best answers are known at the end, so they cannot be streamed",
            param="best_of",
        )
    if body.logprobs is not None and body.n_probs not in (None, body.logprobs):
        raise InvalidRequestError(
            f"'logprobs' and 'n_probs' disagree: {body.logprobs} and {body.n_probs}",
            param="n_probs",
        )
    n_logprobs = body.n_probs if body.logprobs is None else body.logprobs
    if body.post_sampling_probs and (best_of > n or (body.echo and n_logprobs is not None)):
        raise InvalidRequestError(
            "post_sampling_probs: best_of and echo need log-probabilities of the model's own "
            "distribution",
            param="post_sampling_probs",
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and n_logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = n_logprobs
    mix = mix_of(state, body, key)
    prompts = truncated(
        state,
        body,
        prompts_of(
            state,
            mix.defaults.prompts(body.prompt),
            add_special=body.add_special_tokens is not False,
        ),
    )
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
        for choice in _best(result.choices, job.body.n_choices)
    ]
    answer = {**job.head, "choices": choices, "usage": usage_json(results)}
    own = [own_json(result) for result in results]
    # Those of several prompts are beside their choices.
    if len(own) == 1:
        return answer | own[0]
    for choice in choices:
        choice |= own[choice["index"] // (job.body.n_choices)]
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
        "index": number * (job.body.n_choices) + choice.index,
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
        out["logprobs"] = (
            chat_logprobs(vocab, choice.logprobs, post=True)  # where llama-server has one form
            if job.body.post_sampling_probs
            else CompletionLogprobs(vocab).of(found, tokens)
        )
    if job.body.prompt_logprobs is not None:
        out["prompt_logprobs"] = prompt_logprobs_json(vocab, result.prompt_logprobs)
    if job.body.return_token_ids:
        out |= {"token_ids": list(choice.tokens), "prompt_token_ids": prompt.tokens}
    return out


class _ChoiceChunks:
    """One choice of a stream."""

    def __init__(
        self, job: _Job, index: int, run: Run, prompt: TextPrompt, chunk: sse.Chunks
    ) -> None:
        body = job.body
        self._job = job
        self._run = run
        self._prompt = prompt
        self._index = index
        self._ids = bool(body.return_token_ids)
        self._begun = not (body.echo or self._ids or body.prompt_logprobs is not None)
        self._logprobs = None
        if job.n_logprobs is not None:
            self._logprobs = CompletionLogprobs(job.state.engine.model.vocab)
        self._plain = self._logprobs is None and not self._ids
        self.form = chunk.form(self._entry(sse.MARK, None))

    def text(self, event: Event) -> str | None:
        """The text of an event that adds nothing but text, which is the case of nearly all."""
        if self._plain and self._begun and event.finish_reason is None:
            return event.piece
        return None

    def of(self, event: Event) -> list[Fields]:
        """The chunk of an event; before the first one what is to be told of the prompt."""
        out: list[Fields] = [] if self._begun else [{"choices": [self._opening()]}]
        self._begun = True
        entry = self._entry(event.piece, event.finish_reason)
        if self._logprobs is not None:
            found = of_events([event])
            entry["logprobs"] = (
                chat_logprobs(self._job.state.engine.model.vocab, found, post=True)
                if self._job.body.post_sampling_probs
                else self._logprobs.of(found, [one.token for one in found])
            )
        if self._ids:
            entry["token_ids"] = [] if event.token is None else [event.token]
        return [*out, {"choices": [entry]}]

    def _opening(self) -> dict[str, Any]:
        """What a request wants to be told of the prompt."""
        body, vocab = self._job.body, self._job.state.engine.model.vocab
        entry = self._entry(self._prompt.text if body.echo else "", None)
        known = self._run.prompt_logprobs
        if body.echo and self._logprobs is not None:
            tokens = self._prompt.tokens
            entry["logprobs"] = self._logprobs.of(known or (None,) * len(tokens), tokens)
        if body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs_json(vocab, known)
        if self._ids:
            entry |= {"token_ids": [], "prompt_token_ids": self._prompt.tokens}
        return entry

    def _entry(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": reason}


def _chunks(job: _Job) -> AsyncGenerator[bytes, None]:
    chunk = sse.Chunks(job.head)
    n = job.body.n_choices
    choices = [
        _ChoiceChunks(job, number * n + index, run, prompt, chunk)
        for number, (run, prompt) in enumerate(zip(job.runs, job.prompts, strict=True))
        for index in range(n)
    ]
    return chunks(chunk, job.runs, choices, with_usage=wants_usage(job.body))
