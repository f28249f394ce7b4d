"""What goes into the engine and what comes out of it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.counters import Gaps
from loragraph.engine.generate import Prompt
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.params import SamplingParams
from loragraph.engine.registry import Generation
from loragraph.engine.sequence import FinishReason
from loragraph.errors import LoragraphError

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `adapters`: names and user scales; none is the base model. A token carries at
    most 16 unlike adapters: a request for more ends with MixTooLargeError (`Engine.combine` makes
    one of several).

    `n` choices share the prompt; choice i draws with seed + i. Requests with unlike `cache_salt`
    never share cells. `deadline_s` counts from the submission. `prompt_logprobs` k asks for the
    log-probabilities of the prompt's tokens, each given those before it, and of the k most likely
    ones (at most MAX_LOGPROBS): all of the prompt is computed then, whatever the prefix tree holds.
    `generations`: what names meant when the caller looked them up; others mean what they mean now.
    """

    prompt: Prompt
    adapters: Mapping[str, float] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    cache_salt: str = ""
    deadline_s: float | None = None
    chat: bool = False  # a text is one user message
    prompt_logprobs: int | None = None
    generations: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one token adds to a choice. Only a choice's last event has a finish_reason.

    The token that ends a generation has an event too, though it is neither in the choice's text
    nor among its tokens. The first event of a request that asks for `prompt_logprobs` is its first
    choice's, and has them as its result will.
    """

    index: int  # of the choice
    piece: str
    token: int | None  # None: none was generated
    finish_reason: FinishReason | None = None
    logprob: float | None = None  # where the parameters ask for it
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, log-probability), best first
    seat: int = field(default=-1, compare=False)  # where it runs, as in Engine.sequences()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter of a request, and from which token on it was active."""

    name: str
    generation: int
    digest: str
    scale: float
    active_from: int | None  # None: its invocation does not occur in the prompt, so it was off


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated text."""

    index: int
    text: str  # without the stop string
    tokens: tuple[int, ...]  # without the one that ended it
    finish_reason: FinishReason
    stop_string: str | None
    seed: int
    n_cached: int  # prompt tokens found in the prefix tree
    stop_token: int | None = None  # the token that ended it
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of `tokens`, where they were asked for
    seat: int = field(default=-1, compare=False)  # where it ran; -1: nowhere


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds on the engine's clock. The wait for adapters and for a seat is in `queued_s`."""

    queued_s: float = 0.0  # from submission to admission
    prompt_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the end
    gaps: Gaps = field(default_factory=Gaps)  # between the tokens of each choice

    @property
    def total_s(self) -> float:
        """From submission to the end."""
        return self.queued_s + self.prompt_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request; text, tokens and finish_reason are the first choice's."""

    choices: tuple[Choice, ...]
    adapters: tuple[AdapterUse, ...]
    n_prompt: int
    timings: RequestTimings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # None for the first token

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """The first choice's."""
        return self.choices[0].finish_reason

    @property
    def n_cached(self) -> int:
        """Prompt tokens that the first choice found in the prefix tree."""
        return self.choices[0].n_cached


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of given tokens."""

    tokens: tuple[int, ...]
    start: int  # first scored token
    logprobs: NDArray[np.float64]  # (n_tokens - start,) f64, natural logarithm
    adapters: tuple[AdapterUse, ...]

    @property
    def total(self) -> float:
        """The log-probability of the scored tokens together."""
        return float(self.logprobs.sum())


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a prompt's tokens became in the last layer, after the final norm."""

    values: NDArray[np.float32]  # (n_embd,) f32; with pooling "none" (n_tokens, n_embd) f32
    n_prompt: int
    n_cached: int  # prompt tokens found in the prefix tree
    adapters: tuple[AdapterUse, ...]
    timings: RequestTimings


Answer = Result | Score | Embedding
"""What a request ends with if nothing goes wrong."""

Outcome = Event | Answer | LoragraphError
"""What a request's sink gets: events if it wants them, and at last one of the others."""
