"""A request inside the engine: its choices while they are generated, and what it sends out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from loragraph.engine.counters import Gaps
from loragraph.engine.embedding import PooledStates
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.registry import Generation
from loragraph.engine.request import (
    AdapterUse,
    Answer,
    Choice,
    Embedding,
    Event,
    Outcome,
    RequestTimings,
    Result,
    Score,
)
from loragraph.engine.sampler import Sampler
from loragraph.engine.sequence import FinishReason, Sequence
from loragraph.vocab.stream import TextStream

Sink = Callable[[Outcome], None]
"""Gets what a request sends out, on the engine's thread; it must not block or raise."""


@dataclass(slots=True, eq=False)
class ChoiceState:
    """One choice while it is generated."""

    job: Job
    index: int
    sampler: Sampler
    text: TextStream
    sequence: Sequence | None = None  # from the admission on
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of `tokens`, where wanted
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    prompt_done: bool = False
    last_token: float = 0.0  # when it came, on the engine's clock

    @property
    def seat(self) -> int:
        """The last one it had; -1 before the first."""
        return -1 if self.sequence is None else self.sequence.seat

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """A token of the choice."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def finish(
        self,
        piece: str,
        token: int | None,
        reason: FinishReason,
        logprob: TokenLogprob | None = None,
    ) -> None:
        """The choice's last event."""
        self.finish_reason = reason
        self.emit(piece, token, logprob)
        self.sampler.close()

    def emit(self, piece: str, token: int | None, logprob: TokenLogprob | None = None) -> None:
        """Adds a piece, and tells whoever listens."""
        self.pieces.append(piece)
        if not self.job.wants_events:
            return
        reason, seat = self.finish_reason, self.seat
        if logprob is None:
            event = Event(self.index, piece, token, reason, seat=seat)
        else:
            event = Event(self.index, piece, token, reason, logprob.logprob, logprob.top, seat)
        if self.job.prompt_scores is None:
            self.job.sink(event)
        else:
            self.job.tell(event)

    def result(self) -> Choice:
        """What was generated; "abort" where it has not ended."""
        return Choice(
            index=self.index,
            text="".join(self.pieces),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason or "abort",
            stop_string=self.text.stop_string,
            seed=self.sampler.seed,
            n_cached=0 if self.sequence is None else self.sequence.n_hit,
            stop_token=self.stop_token,
            logprobs=tuple(self.logprobs),
            seat=self.seat,
        )


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens from `start` on, as far as they are computed."""

    start: int
    n_top: int
    found: list[TokenLogprob] = field(default_factory=list)
    early: list[Event] | None = field(default_factory=list)  # those that wait; None: told

    @property
    def of_all(self) -> tuple[TokenLogprob | None, ...]:
        """Nothing is known of the first token."""
        return (None, *self.found)


@dataclass(slots=True, eq=False)
class Job:
    """One request. Equality is identity; it is its own ticket in the pool."""

    tokens: list[int]  # the prompt
    scales: Mapping[Generation, float]  # in the order of the request, no zeros
    max_tokens: int
    sink: Sink
    number: int = 0  # tells requests apart, in tables
    salt: str = ""
    deadline: float | None = None
    wants_events: bool = False
    prompt_scores: PromptScores | None = None  # wanted of the prompt; by its first choice
    is_score: bool = False  # the answer is a Score
    states: PooledStates | None = None  # the answer is an Embedding
    choices: list[ChoiceState] = field(default_factory=list)
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    gaps: Gaps = field(default_factory=Gaps)
    uses: tuple[AdapterUse, ...] = ()
    ended: bool = False

    @property
    def flow(self) -> Hashable:
        """The set of adapters it needs: what fairness is about."""
        return tuple(sorted(generation.number for generation in self.scales))

    @property
    def wanted(self) -> dict[Generation, int]:
        """The adapters it needs, with their bytes."""
        return {generation: generation.header.nbytes for generation in self.scales}

    @property
    def results_from(self) -> int | None:
        """The first prompt token whose logits or state are wanted; None: only the next token is."""
        if self.states is not None:
            return self.states.first_needed(len(self.tokens))
        return None if self.prompt_scores is None else self.prompt_scores.start - 1

    @property
    def sequences(self) -> list[Sequence]:
        """What the scheduler knows of it."""
        return [one.sequence for one in self.choices if one.sequence is not None]

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def tell(self, event: Event) -> None:
        """Sends an event, the first with the log-probabilities of the prompt.

        They are complete with the first choice's first token. Another choice may have found the
        prompt in the tree, and be earlier.
        """
        scores = self.prompt_scores
        assert scores is not None
        if scores.early is None:
            self.sink(event)
        elif event.index:
            scores.early.append(event)
        else:
            self.sink(replace(event, prompt_logprobs=scores.of_all))
            early, scores.early = scores.early, None
            for one in early:
                self.sink(one)

    def answer(self, now: float) -> Answer:
        """What there is by `now`."""
        scores = self.prompt_scores
        if self.is_score:
            assert scores is not None
            logprobs = np.array([one.logprob for one in scores.found])
            return Score(tuple(self.tokens), scores.start, logprobs, self.uses)
        if self.states is not None:
            n_cached = sum(sequence.n_hit for sequence in self.sequences)
            values, n_prompt = self.states.result(), len(self.tokens)
            return Embedding(values, n_prompt, n_cached, self.uses, self._timings(now))
        return Result(
            tuple(choice.result() for choice in self.choices),
            self.uses,
            len(self.tokens),
            self._timings(now),
            None if scores is None else scores.of_all,
        )

    def close(self) -> None:
        """Frees the samplers; a second call does nothing."""
        for choice in self.choices:
            choice.sampler.close()

    def _timings(self, now: float) -> RequestTimings:
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        gaps = Gaps(list(self.gaps.counts), self.gaps.total_s)
        return RequestTimings(started - self.submitted, first - started, now - first, gaps)
