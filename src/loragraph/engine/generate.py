"""From a prompt to text: the loop of decoding and sampling, one event a token.

Knows tokens and text; how logits come about is the context's matter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeGuard

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.logprobs import TokenLogprob, token_logprobs
from loragraph.engine.params import SamplingParams
from loragraph.engine.sampler import Sampler
from loragraph.errors import InvalidRequestError, LifecycleError
from loragraph.vocab.stream import TextStream

if TYPE_CHECKING:
    from loragraph.engine.context import Context
    from loragraph.engine.model import Model

FinishReason = Literal["stop", "length", "abort"]
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Messages
"""A text, token ids, or chat messages ({"role": ..., "content": ...})."""


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments; `stop` may be one string or several."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    min_keep: int
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    grammar: str | None
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    max_tokens: int | None
    ignore_eos: bool
    logprobs: int | None
    post_sampling_probs: bool
    stop_token_ids: Sequence[int]
    min_tokens: int
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """What one token adds. `piece` may be "": its text waits for the rest of a character or may
    turn out to be a stop string. Only the last event has a `finish_reason`.
    """

    piece: str
    token: int | None  # None: no token was asked for
    finish_reason: FinishReason | None = None
    logprob: float | None = None  # where the parameters ask for it
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, log-probability), best first


@dataclass(frozen=True, slots=True)
class Timings:
    """Time spent inside the engine: decoding and sampling, not the caller's work between events."""

    n_prompt: int = 0
    prompt_ms: float = 0.0  # until the first token is known
    n_decoded: int = 0  # tokens after the first one
    decode_ms: float = 0.0

    @property
    def prompt_per_s(self) -> float:
        """Prompt tokens a second; 0.0 where nothing was measured."""
        return 1e3 * self.n_prompt / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def decode_per_s(self) -> float:
        """Generated tokens a second, without the first; 0.0 where nothing was measured."""
        return 1e3 * self.n_decoded / self.decode_ms if self.decode_ms else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished (or, with "abort", interrupted) generation."""

    text: str  # without the stop string
    tokens: tuple[int, ...]  # all that were generated, but for the one that ends a generation
    finish_reason: FinishReason
    stop_string: str | None  # the one that was met
    n_prompt: int  # prompt tokens, with those that the vocabulary adds
    timings: Timings
    seed: int  # the one in use: give it again for the same text
    adapters: tuple[tuple[str, float], ...]  # (digest, user scale); empty: the base
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of `tokens`, where they were asked for

    @property
    def n_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens)


class GenerationStream:
    """Iterator over the events of one generation; made by `Context.stream`.

    It may be left or closed at any event: the context then holds the prompt and the tokens of
    the events so far. Using the context's sequence in between raises LifecycleError here.
    """

    def __init__(self, context: Context, prompt: Sequence[int], params: SamplingParams) -> None:
        """`prompt` (n_prompt,) token ids, which are computed at the first event."""
        self.params = params
        self._context = context
        self._vocab = context.model.vocab
        self._prompt = list(prompt)
        self._n_past = context.n_past
        self._adapters = context.mix.key
        self._text = TextStream(params.stop, keep_stop=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._timings = Timings(n_prompt=len(self._prompt))
        self._finish_reason: FinishReason | None = None
        self._busy = threading.Lock()
        self._sampler = Sampler(self._vocab, params, self._prompt, context.n_ctx)
        # A stream that is merely dropped, as by `break`, must not leak libllama's samplers.
        self._release = weakref.finalize(self, self._sampler.close)
        self._release.atexit = False

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._sampler.seed

    @property
    def result(self) -> Generation:
        """What was generated so far; its finish_reason is "abort" until the last event."""
        return Generation(
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            finish_reason=self._finish_reason or "abort",
            stop_string=self._text.stop_string,
            n_prompt=len(self._prompt),
            timings=self._timings,
            seed=self.seed,
            adapters=self._adapters,
            logprobs=tuple(self._logprobs),
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationEvent:
        if not self._busy.acquire(blocking=False):
            raise LifecycleError("a generation is read by two threads at once")
        try:
            if not self._release.alive:
                raise StopIteration
            event = self._next_event()
            if event.finish_reason is not None:
                self.close()
            return event
        except BaseException:
            self.close()
            raise
        finally:
            self._busy.release()

    def close(self) -> None:
        """Ends the generation; a second call does nothing."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _next_event(self) -> GenerationEvent:
        if self._context.n_past != self._n_past:
            raise LifecycleError(
                f"the sequence of {self._context.name} was changed while a generation read it",
                hint="finish or close the stream first",
            )
        if self.params.max_tokens == 0:
            self._context.decode(self._prompt, outputs="last")
            return self._event("", None, "length")
        token, logprob = self._next_token()
        if self._vocab.is_eog(token) or token in self.params.stop_token_ids:
            return self._event(self._text.end(self._piece(token)), token, "stop", logprob)
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        may_stop = len(self._tokens) > self.params.min_tokens
        piece = self._text.feed(self._piece(token), may_stop=may_stop)
        full = self._context.n_past >= self._context.n_ctx
        if not full:
            self._context.hold(token)
        self._n_past = self._context.n_past
        limit = self.params.max_tokens
        reason: FinishReason | None = None
        if full or (limit is not None and len(self._tokens) >= limit):
            piece += self._text.flush()
            reason = "length"
        if self._text.stopped:
            reason = "stop"
        return self._event(piece, token, reason, logprob)

    def _piece(self, token: int) -> bytes:
        return self._vocab.piece(token, special=not self.params.skip_special_tokens)

    def _next_token(self) -> tuple[int, TokenLogprob | None]:
        start = time.perf_counter()
        first = not self._tokens
        # After the first event the context holds the token before; nothing else is to be added.
        logits = self._context.decode(self._prompt if first else (), outputs="last")
        self._n_past = self._context.n_past
        logits = logits[:, : self._vocab.n_tokens]
        token = self._sampler.sample(logits[0])
        self._sampler.accept(token)
        n_top = self.params.logprobs
        logprob = None
        if n_top is not None:
            logprob = (
                self._sampler.drawn(token)
                if self.params.post_sampling_probs
                else token_logprobs(logits, [token], [n_top])[0]
            )
        ms = 1e3 * (time.perf_counter() - start)
        was = self._timings
        self._timings = (
            replace(was, prompt_ms=ms)
            if first
            else replace(was, n_decoded=was.n_decoded + 1, decode_ms=was.decode_ms + ms)
        )
        return token, logprob

    def _event(
        self,
        piece: str,
        token: int | None,
        reason: FinishReason | None,
        logprob: TokenLogprob | None = None,
    ) -> GenerationEvent:
        self._pieces.append(piece)
        self._finish_reason = reason
        if logprob is None:
            return GenerationEvent(piece, token, reason)
        return GenerationEvent(piece, token, reason, logprob.logprob, logprob.top)


def sampling_params(params: SamplingParams | None, fields: SamplingFields) -> SamplingParams:
    """`params` (or the defaults) with `fields` replaced. TypeError for an unknown field."""
    changes: dict[str, Any] = dict(fields)
    if isinstance(changes.get("stop"), str):
        changes["stop"] = (changes["stop"],)
    for name in ("stop", "stop_token_ids", "dry_sequence_breakers"):
        if isinstance(changes.get(name), list):
            changes[name] = tuple(changes[name])
    return replace(params or SamplingParams(), **changes)


def prompt_tokens(
    model: Model, prompt: Prompt, *, chat: bool = False, begins: bool = True
) -> list[int]:
    """The token ids of a prompt.

    With `chat` a text is one user message; messages are a chat anyway. `begins`: the prompt
    stands at the beginning of a sequence, where the vocabulary may want BOS.
    """
    if isinstance(prompt, str):
        if chat:
            return model.chat_tokens([{"role": "user", "content": prompt}], begins=begins)
        return model.vocab.tokenize(prompt, add_special=begins)
    if _are_messages(prompt):
        return model.chat_tokens(prompt, begins=begins)
    if chat:
        raise InvalidRequestError(
            "expected a text or a list of messages for a chat, got token ids", param="prompt"
        )
    return _ids(prompt)


def _are_messages(prompt: object) -> TypeGuard[Messages]:
    """True for a list of mappings; an empty list is one of no token ids."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(one, Mapping) for one in prompt)


def _ids(prompt: object) -> list[int]:
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of unlike lengths inside
        ids = np.array(None)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"prompt: expected a text, token ids or messages, got {prompt!r:.80}", param="prompt"
        )
    return [int(token) for token in ids]
