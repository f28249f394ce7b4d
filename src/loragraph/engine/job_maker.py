"""From a request to a job: names to generations, prompt to tokens, samplers. For any thread."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from loragraph.engine.embedding import PooledStates, Pooling, check_pooling
from loragraph.engine.generate import prompt_tokens
from loragraph.engine.job import ChoiceState, Job, PromptScores, Sink
from loragraph.engine.model import Model
from loragraph.engine.options import integer
from loragraph.engine.params import MAX_LOGPROBS, SamplingParams
from loragraph.engine.registry import Generation, Registry
from loragraph.engine.request import MAX_CHOICES, Request
from loragraph.engine.sampler import Sampler
from loragraph.errors import ConfigError, ContextLengthError, InvalidRequestError
from loragraph.vocab.stream import TextStream


class JobMaker:
    """Makes jobs for one model, with at most `limit` tokens each."""

    def __init__(self, model: Model, registry: Registry, limit: int) -> None:
        self._model = model
        self._registry = registry
        self._limit = limit
        self._numbers = itertools.count(1)

    def make(
        self,
        request: Request,
        sink: Sink,
        *,
        wants_events: bool = False,
    ) -> Job:
        """Checks a request and makes it ready, on the caller's thread."""
        scales = self.resolve(request.adapters, request.generations)
        n = integer_field(request.n, "n", 1, MAX_CHOICES)
        if not isinstance(request.cache_salt, str):
            raise InvalidRequestError("cache_salt: expected a text", param="cache_salt")
        n_top = request.prompt_logprobs
        if n_top is not None:
            integer_field(n_top, "prompt_logprobs", 0, MAX_LOGPROBS)
        deadline = _deadline(request.deadline_s)
        tokens = self._prompt(request)
        limit = self._limit
        wanted = request.params.max_tokens
        most = limit if wanted == 0 else limit - 1
        if len(tokens) > most:
            raise ContextLengthError(
                f"expected a prompt of at most {most} tokens, got {len(tokens)}",
                n_prompt_tokens=len(tokens),
                n_ctx=limit,
                param="prompt",
                hint="shorten the prompt or raise n_ctx",
            )
        job = Job(
            tokens,
            scales,
            max_tokens=limit if wanted is None else wanted,
            sink=sink,
            number=next(self._numbers),
            salt=request.cache_salt,
            deadline=deadline,
            wants_events=wants_events,
            prompt_scores=None if n_top is None else PromptScores(1, n_top),
        )
        try:
            self._add_choices(job, request.params, n)
        except BaseException:
            job.close()
            raise
        return job

    def make_score(self, request: Request, start: int, sink: Sink) -> Job:
        """A job whose result is the score of the prompt's tokens from `start` on."""
        params = SamplingParams(temperature=0, max_tokens=0)
        job = self.make(replace(request, params=params, n=1, prompt_logprobs=0), sink)
        try:
            start = integer_field(start, "start", 1, len(job.tokens) - 1)
        except InvalidRequestError:
            job.close()
            raise
        job.prompt_scores, job.is_score = PromptScores(start, 0), True
        return job

    def make_embedding(self, request: Request, pooling: Pooling, normalize: int, sink: Sink) -> Job:
        """A job whose answer is the embedding of the prompt."""
        check_pooling(pooling, normalize)
        params = SamplingParams(temperature=0, max_tokens=0)
        job = self.make(replace(request, params=params, n=1, prompt_logprobs=None), sink)
        job.states = PooledStates(pooling, normalize)
        return job

    def _add_choices(self, job: Job, params: SamplingParams, n: int) -> None:
        """Choice i draws with seed + i."""
        first = Sampler(self._model.vocab, params, job.tokens, self._limit)
        job.choices.append(ChoiceState(job, 0, first, _text_stream(params)))
        for index in range(1, n):
            sampler = first.with_seed((first.seed + index) % 2**32)
            job.choices.append(ChoiceState(job, index, sampler, _text_stream(params)))

    def _prompt(self, request: Request) -> list[int]:
        tokens = prompt_tokens(self._model, request.prompt, chat=request.chat)
        if not tokens:
            raise InvalidRequestError("prompt: expected at least one token", param="prompt")
        n_vocab = self._model.hparams.n_vocab
        if not 0 <= min(tokens) <= max(tokens) < n_vocab:
            raise InvalidRequestError(
                f"expected token ids from 0 to {n_vocab - 1}, got {min(tokens)} to {max(tokens)}",
                param="prompt",
            )
        return tokens

    def resolve(
        self, adapters: Mapping[str, float] | None, known: Iterable[Generation] = ()
    ) -> dict[Generation, float]:
        """Generations and scales of names, without those at scale 0; `known` ones as given."""
        given = {one.name: one for one in known}
        scales: dict[Generation, float] = {}
        if adapters is not None and not isinstance(adapters, Mapping):
            raise InvalidRequestError(
                f"adapters: expected names with scales, got {adapters!r:.80}", param="adapters"
            )
        for name, scale in (adapters or {}).items():
            value = _scale(name, scale)
            # an unknown name is one at scale 0 too
            generation = given.get(name) or self._registry.resolve(name)
            if value != 0:
                scales[generation] = value
        return scales


def integer_field(value: object, field: str, low: int, high: int) -> int:
    """`options.integer` for a field of a request."""
    try:
        return integer(value, field, low, high)
    except ConfigError as error:
        raise InvalidRequestError(str(error), param=field) from error


def _deadline(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidRequestError(
            f"deadline_s: expected seconds above 0, got {seconds!r}", param="deadline_s"
        )
    return time.monotonic() + seconds


def _scale(name: str, scale: object) -> float:
    """The scale as f32; 0 for one that is dropped."""
    good = isinstance(scale, int | float | np.floating) and not isinstance(scale, bool)
    with np.errstate(over="ignore"):
        value = float(np.float32(scale)) if good and abs(scale) < 1e39 else math.nan  # type: ignore
    if not math.isfinite(value):
        raise InvalidRequestError(
            f"adapters: '{name}': expected a finite scale, got {scale!r:.40}", param="adapters"
        )
    return value


def _text_stream(params: SamplingParams) -> TextStream:
    return TextStream(params.stop, keep_stop=params.include_stop_str_in_output)
