"""POST /completion and /infill: text from a prompt, with llama-server's fields and shapes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import MAX_CHOICES, Event, Request, Result
from loragraph.errors import InvalidRequestError
from loragraph.server import sse
from loragraph.server.errors import fields_as_sent
from loragraph.server.forms import cached_grammar
from loragraph.server.gate import ApiKey, RequestId
from loragraph.server.llamacpp.answers import Asked, ChunkBytes, final_json
from loragraph.server.llamacpp.prompts import (
    fim_tokens,
    infill_tokens,
    prompt_tokens,
    split_prompts,
)
from loragraph.server.llamacpp.samplers import own_sampling, refuse_others
from loragraph.server.llamacpp.timed import TimedRun
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.routing import api_router
from loragraph.server.runs import Run, finish_all, merged_events, while_connected
from loragraph.server.sampling import SamplingBody, sampling_params, sent_names
from loragraph.server.sidecar import Defaults
from loragraph.server.state import ServerState, State

router = api_router(tags=["llama-server"])


class CompletionBody(SamplingBody):
    """The fields; unknown ones are allowed, as llama-server has it. null is a missing one."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: Any = None
    model: str | None = None
    lora: Any = None
    adapters: Any = None  # ours: {"name": scale}
    adapter_defaults: bool | None = None  # ours: false leaves sidecars out
    stream: bool | None = None
    n_probs: int | None = None
    logprobs: int | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_schema: Any = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None  # ours and vLLM's
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    t_max_predict_ms: int | None = None
    sse_ping_interval: int | None = None  # seconds


class InfillBody(CompletionBody):
    """Text around a gap, and the fields of /completion."""

    input_prefix: str
    input_suffix: str
    input_extra: list[dict[str, Any]] | None = None


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(
    body: CompletionBody, http: HttpRequest, state: State, request_id: RequestId, key: ApiKey
) -> Response:
    """A text for each prompt."""
    maker = _Maker(state, body, request_id, key, "completion")
    return await _answer(http, state, body, *await asyncio.to_thread(maker.completions))


@router.post("/infill")
async def infill(
    body: InfillBody, http: HttpRequest, state: State, request_id: RequestId, key: ApiKey
) -> Response:
    """What belongs between two texts; 501 where the model has no tokens for that."""
    maker = _Maker(state, body, request_id, key, "infill")
    return await _answer(http, state, body, *await asyncio.to_thread(maker.infill, body))


class _Maker:
    """Makes the runs of one request. Tokenises, and may read files, so not on the event loop."""

    def __init__(
        self, state: ServerState, body: CompletionBody, request_id: str, key: str, route: str
    ) -> None:
        self._state = state
        self._body = body
        self._request_id = request_id
        self._key = key
        self._route = route
        self._names = sent_names(body, {"logprobs": ("n_probs", "logprobs")})
        if body.grammar is None and body.json_schema is not None:
            self._names |= dict.fromkeys(("grammar", "pattern"), "json_schema")

    def completions(self) -> tuple[list[tuple[Run, Asked]], bool]:
        """A run for each prompt, and whether their answers form a list."""
        body, state = self._body, self._state
        if body.prompt is None:
            raise InvalidRequestError("prompt: the field is missing", param="prompt")
        prompts, several = split_prompts(body.prompt, state.config.max_prompts)
        mix = self._mix()
        params = self._params(mix.defaults)
        vocab = state.engine.model.vocab
        made = [
            self._run(prompt_tokens(vocab, prompt, mix.defaults), params, mix) for prompt in prompts
        ]
        return made, several

    def infill(self, body: InfillBody) -> tuple[list[tuple[Run, Asked]], bool]:
        """One run."""
        vocab = self._state.engine.model.vocab
        fim_tokens(vocab)
        mix = self._mix()
        params = self._params(mix.defaults)
        limit = self._state.engine.config.sequence_limit
        n_most = limit - min(limit // 2, max(1, params.max_tokens or 1))
        prompts, _ = split_prompts("" if body.prompt is None else body.prompt, 1)
        tokens = infill_tokens(
            vocab, body.input_prefix, body.input_suffix, body.input_extra or (), prompts[0], n_most
        )
        return [self._run(tokens, params, mix)], False

    def _mix(self) -> RequestMix:
        body = self._body
        return resolve_mix(
            self._state,
            body.model,
            body.lora,
            body.adapters,
            key=self._key,
            adapter_defaults=body.adapter_defaults,
        )

    def _params(self, defaults: Defaults) -> SamplingParams:
        body = self._body
        refuse_others(body.model_extra or {})
        n_probs = body.n_probs if body.n_probs is not None else body.logprobs
        with fields_as_sent(self._names):
            grammar = body.grammar or None  # "" is none
            if body.json_schema is not None and grammar is None:
                grammar = cached_grammar(body.json_schema)
            return sampling_params(
                self._state,
                own_sampling(body),
                grammar=grammar,
                defaults=defaults.params({}),
                **({"logprobs": n_probs} if n_probs else {}),
            )

    def _run(self, tokens: list[int], params: SamplingParams, mix: RequestMix) -> tuple[Run, Asked]:
        body, engine = self._body, self._state.engine
        salt = body.cache_salt or ""
        if body.cache_prompt is False:  # nobody else's prefix has this salt
            salt = f"{salt}\0{secrets.token_hex(16)}"
        n = body.n_cmpl if body.n_cmpl is not None else body.n
        request = Request(
            tokens,
            mix.scales,
            params,
            1 if n is None else n,
            salt,
            deadline_s=self._state.config.deadline_s,
            generations=mix.generations,
        )
        limit = engine.config.sequence_limit
        fits = len(tokens) <= limit and max(tokens) < engine.model.vocab.n_tokens
        asked = Asked(
            params,
            len(tokens),
            engine.model.vocab.detokenize(tokens) if fits and min(tokens) >= 0 else "",
            lora=body.lora if isinstance(body.lora, list) else (),
            stream=bool(body.stream),
            return_tokens=bool(body.return_tokens),
            fields=tuple(body.response_fields or ()),
            sequence_limit=limit,
        )
        own = self._state, request, mix, self._request_id, self._route
        most_ms = body.t_max_predict_ms
        if most_ms is not None and most_ms > 0:
            return TimedRun(*own, seconds=most_ms / 1e3, names=self._names), asked
        return Run(*own, names=self._names), asked


async def _answer(
    http: HttpRequest,
    state: ServerState,
    body: CompletionBody,
    made: list[tuple[Run, Asked]],
    several: bool,
) -> Response:
    if made[0][1].stream:
        chunks = _chunks(state, made)
        ping_s = state.config.ping_s(body.sse_ping_interval)
        return await sse.event_stream(chunks, state.config.send_timeout_s, end=b"", ping_s=ping_s)
    results = await while_connected(http, finish_all([run for run, _ in made]))
    answers = [
        answer
        for i, ((run, asked), result) in enumerate(zip(made, results, strict=True))
        for answer in _finals(state, run, asked, result, i * len(result.choices))
    ]
    return JSONResponse(answers if several or len(answers) > 1 else answers[0])


def _finals(
    state: ServerState, run: Run, asked: Asked, result: Result, first: int
) -> list[dict[str, Any]]:
    """The last words of a run's choices, numbered from `first` on."""
    vocab = state.engine.model.vocab
    return [
        final_json(asked, replace(choice, index=first + choice.index), result, vocab, run.mix.model)
        for choice in result.choices
    ]


async def _chunks(state: ServerState, made: list[tuple[Run, Asked]]) -> AsyncGenerator[bytes, None]:
    """A chunk for each token, and the last words of each run at its end; no [DONE]."""
    stream = _Stream(state, made)
    async with aclosing(merged_events([run for run, _ in made])) as batches:
        async for number, events in batches:
            chunk = stream.of(number, events) if events else stream.end(number)
            if chunk:
                yield chunk


class _Stream:
    """What has been sent of several runs."""

    def __init__(self, state: ServerState, made: list[tuple[Run, Asked]]) -> None:
        self._state = state
        self._vocab = state.engine.model.vocab
        self._made = made
        self._counts: dict[int, int] = {}  # tokens by index
        self._forms: dict[int, ChunkBytes] = {}

    def of(self, number: int, events: list[Event]) -> bytes:
        """A run's events, each a chunk."""
        run, asked = self._made[number]
        chunks = []
        for event in events:
            index = number * run.request.n + event.index
            form = self._forms.get(index)
            if form is None:
                form = self._forms[index] = ChunkBytes(asked, index, self._vocab)
            count = self._counts.get(index, 0)
            ends = event.finish_reason is not None and self._ends(event, asked.params)
            if not ends:
                count = self._counts[index] = count + 1
            elif not event.piece:  # not a token of the text
                continue
            chunks.append(form.of(event, count, has_token=not ends))
        return b"".join(chunks)

    def end(self, number: int) -> bytes:
        """The last words of a run that has ended, whose events all were told."""
        run, asked = self._made[number]
        assert run.result is not None, "the run has not ended"
        finals = _finals(self._state, run, asked, run.result, number * run.request.n)
        return b"".join(map(sse.data, finals))

    def _ends(self, event: Event, params: SamplingParams) -> bool:
        """Whether the event is that of a token which ends a generation, or of none."""
        if event.token is None:
            return True
        if event.finish_reason != "stop":
            return False
        return event.token in self._vocab.eog_tokens or event.token in params.stop_token_ids
