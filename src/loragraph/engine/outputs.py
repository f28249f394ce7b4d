"""From the logits of a step to what its requests get: tokens, texts, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.counters import CoreStats
from loragraph.engine.job import ChoiceState, Job
from loragraph.engine.logprobs import TokenLogprob, best_tokens, token_logprobs
from loragraph.engine.parts import TokenTexts
from loragraph.engine.passes import RunCalls, together
from loragraph.engine.plan import Chunk, StepPlan
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.sequence import Sequence as TokenSequence
from loragraph.errors import BackendError, LoragraphError
from loragraph.kernels.sampling import Passes, run_alone

Logits = NDArray[np.float32]


@dataclass(slots=True)
class Ended:
    """The jobs that ended with a step, each once."""

    done: dict[Job, None] = field(default_factory=dict)
    failed: dict[Job, LoragraphError] = field(default_factory=dict)

    @property
    def spoiled(self) -> bool:
        """Whether cells may hold values that are not finite."""
        return any(isinstance(error, BackendError) for error in self.failed.values())


class StepOutputs:
    """The choices in the scheduler, by their sequences."""

    def __init__(
        self,
        scheduler: Scheduler,
        texts: TokenTexts,
        stats: CoreStats,
        clock: Callable[[], float],
        run_calls: RunCalls = run_alone,
    ) -> None:
        self.choices: dict[TokenSequence, ChoiceState] = {}
        self._stats = stats
        self._scheduler = scheduler
        self._texts = texts
        self._clock = clock
        self._pieces: dict[int, tuple[bytes, bool]] = {}
        self._all_pieces: dict[int, tuple[bytes, bool]] = {}  # those of control tokens too
        self._run_calls = run_calls

    def update(self, plan: StepPlan, logits: Logits, states: NDArray[np.float32]) -> Ended:
        """Samples and sends out.

        `logits` (n_logits, n_vocab) f32 and `states` (n_states, n_embd) f32, each in the order of
        the chunks.
        """
        ended = Ended()
        chosen: list[tuple[ChoiceState, int]] = []
        logits = logits[:, : self._texts.n_tokens]
        row = state_row = 0
        now = self._clock()
        for chunk in plan.chunks:
            choice = self.choices[chunk.sequence]
            if not choice.prompt_done and chunk.end >= chunk.sequence.n_prompt:
                self._count_prompt(choice, chunk.sequence, now)
            if chunk.sequence.gives_states:
                rows = slice(state_row, state_row + chunk.n_outputs)
                state_row = rows.stop
                self._embed(choice.job, states[rows], ended)
            else:
                rows = slice(row, row + chunk.n_outputs)
                row = rows.stop
                if chunk.sequence.logits_from is not None:
                    self._score(choice.job, chunk, logits[rows], ended)
            if chunk.wants_token:
                chosen.append((choice, rows.stop - 1))
            elif chunk.sequence.finish_reason is not None:  # max_tokens 0
                choice.finish("", None, "length")
                self._end_if_done(choice.job, ended)
        if chosen:
            self._choose(chosen, logits, ended, now)
        return ended

    def drop(self, sequences: Iterable[TokenSequence]) -> None:
        """They have left the scheduler."""
        for sequence in sequences:
            self.choices.pop(sequence, None)

    def _embed(self, job: Job, states: NDArray[np.float32], ended: Ended) -> None:
        """The states (n, n_embd) f32 of the prompt's next tokens."""
        assert job.states is not None
        job.states.add(states)
        if not np.isfinite(states).all():
            ended.failed[job] = BackendError("the model's states are not finite numbers")

    def _score(self, job: Job, chunk: Chunk, logits: Logits, ended: Ended) -> None:
        """Row i of `logits` (n_outputs, n_tokens) tells of the token behind its own."""
        scores = job.prompt_scores
        assert scores is not None, "a sequence wants logits of its prompt, and its job does not"
        first = chunk.end - chunk.n_outputs
        following = job.tokens[first + 1 : chunk.end + 1]
        found = token_logprobs(logits, following, [scores.n_top] * len(following))
        scores.found.extend(found)
        if not np.isfinite([one.logprob for one in found]).all():
            ended.failed[job] = BackendError("the model's logits are not finite numbers")

    def _choose(
        self, chosen: Sequence[tuple[ChoiceState, int]], logits: Logits, ended: Ended, now: float
    ) -> None:
        """The next token of each choice; `logits` (n_outputs, n_tokens) f32, a row of it each."""
        best = best_tokens(logits, [row for choice, row in chosen if choice.sampler.is_argmax])
        found: list[int | LoragraphError | None] = [None] * len(chosen)
        rest: list[tuple[int, Passes[int]]] = []
        for index, (choice, row) in enumerate(chosen):
            found[index] = token = best.get(row)
            if token is None or token in (choice.sampler.forbidden or ()):
                rest.append((index, choice.sampler.sampling(logits[row])))
        drawn = together([passes for _, passes in rest], self._run_calls)
        for (index, _), one in zip(rest, drawn, strict=True):
            found[index] = one
        sampled = self._accepted(chosen, found, ended)
        logprobs = _logprobs(sampled, logits)
        for choice, _, token in sampled:
            if choice.job not in ended.failed:
                self._count_token(choice, now)
                self._take(choice, token, logprobs.get(choice), ended)

    @staticmethod
    def _accepted(
        chosen: Sequence[tuple[ChoiceState, int]],
        found: Sequence[int | LoragraphError | None],
        ended: Ended,
    ) -> list[tuple[ChoiceState, int, int]]:
        """The choices that go on with a token, each with its row of the logits."""
        sampled: list[tuple[ChoiceState, int, int]] = []
        for (choice, row), token in zip(chosen, found, strict=True):
            if choice.job in ended.failed:
                continue
            try:
                if isinstance(token, LoragraphError):
                    raise token
                assert token is not None
                choice.sampler.accept(token)
                sampled.append((choice, row, token))
            except LoragraphError as error:
                ended.failed[choice.job] = error
        return sampled

    def _take(
        self, choice: ChoiceState, token: int, logprob: TokenLogprob | None, ended: Ended
    ) -> None:
        """A sampled token: text, stop strings, the end."""
        job, sequence, params = choice.job, choice.sequence, choice.sampler.params
        assert sequence is not None
        piece, ends = self._piece(token, special=not params.skip_special_tokens)
        if ends or token in params.stop_token_ids:
            self._scheduler.finish(sequence, "stop")
            choice.stop_token = token
            choice.finish(choice.text.end(piece), token, "stop", logprob)
            self._end_if_done(job, ended)
            return
        choice.add(token, logprob)
        text = choice.text.feed(piece, may_stop=len(choice.tokens) > params.min_tokens)
        self._scheduler.append(sequence, token)
        if sequence.finish_reason is not None:
            text += choice.text.flush()
        if choice.text.stopped:
            self._scheduler.finish(sequence, "stop")
            choice.finish(text, token, "stop", logprob)
        elif sequence.finish_reason is not None:
            choice.finish(text, token, "length", logprob)
        else:
            choice.emit(text, token, logprob)
            return
        self._end_if_done(job, ended)

    def _count_prompt(self, choice: ChoiceState, sequence: TokenSequence, now: float) -> None:
        """The prompt's last token was computed, for the first time."""
        choice.prompt_done = True
        stats, job = self._stats, choice.job
        stats.n_prompt_tokens += sequence.n_prompt
        stats.n_prompt_tokens_cached += sequence.n_hit
        stats.n_tokens_max = max(stats.n_tokens_max, sequence.n_prompt)
        if choice.index == 0 and job.started is not None:  # the others share its prompt
            stats.prompt_s += now - job.started

    def _count_token(self, choice: ChoiceState, now: float) -> None:
        stats, job = self._stats, choice.job
        assert choice.sequence is not None
        stats.n_generated_tokens += 1
        stats.n_tokens_max = max(stats.n_tokens_max, len(choice.sequence.tokens) + 1)
        if choice.tokens:
            stats.decode_s += now - choice.last_token
            job.gaps.add(now - choice.last_token)
        choice.last_token = now
        if job.first_token is None:
            job.first_token = now

    def _end_if_done(self, job: Job, ended: Ended) -> None:
        if job.done and job not in ended.failed:
            ended.done[job] = None

    def _piece(self, token: int, *, special: bool) -> tuple[bytes, bool]:
        """Its bytes, of a control token only with `special`, and whether it ends a generation."""
        pieces = self._all_pieces if special else self._pieces
        found = pieces.get(token)
        if found is None:
            found = self._texts.piece(token, special=special), self._texts.is_eog(token)
            pieces[token] = found
        return found


def _logprobs(
    sampled: Sequence[tuple[ChoiceState, int, int]], logits: Logits
) -> dict[ChoiceState, TokenLogprob]:
    """Log-probabilities for the choices that want them; `logits` (n_outputs, n_tokens) f32."""
    wanted: list[tuple[ChoiceState, int, int, int]] = []
    logprobs: dict[ChoiceState, TokenLogprob] = {}
    for choice, row, token in sampled:
        params = choice.sampler.params
        if params.logprobs is None:
            continue
        if params.post_sampling_probs:
            logprobs[choice] = choice.sampler.drawn(token)
        else:
            wanted.append((choice, row, token, params.logprobs))
    if wanted:
        own = logits[[row for _, row, _, _ in wanted]]
        found = token_logprobs(own, [one[2] for one in wanted], [one[3] for one in wanted])
        logprobs |= {one[0]: logprob for one, logprob in zip(wanted, found, strict=True)}
    return logprobs
