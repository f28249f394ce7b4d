"""The table of sequences: what runs and waits, as a server's `/slots` shows it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragraph.engine.job import ChoiceState
from loragraph.engine.params import SamplingParams

SequenceState = Literal["queued", "loading", "waiting", "prompt", "text"]
RequestKind = Literal["text", "score", "embedding"]


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """One choice of a request.

    queued: waits for a seat or for room for its adapters; loading: for its adapters; waiting: for
    cells, again after a preemption; prompt and text: has a seat and computes. A seat is a number
    below max_sequences, kept while the sequence runs.
    """

    request: int  # its number
    index: int  # of the choice
    state: SequenceState
    seat: int | None
    kind: RequestKind
    n_prompt: int
    n_prompt_done: int  # prompt tokens that have cells
    n_cached: int  # of these, found in the prefix tree
    n_decoded: int
    n_max: int  # tokens that it may generate
    adapters: tuple[tuple[str, float], ...]  # names and user scales
    params: SamplingParams
    seed: int
    age_s: float  # since its submission
    has_new_line: bool = False  # in its text


def sequence_row(
    choice: ChoiceState, seat: int | None, now: float, *, loading: bool
) -> SequenceRow:
    """The row of a choice."""
    job, sequence = choice.job, choice.sequence
    kind: RequestKind = "score" if job.is_score else "embedding" if job.states else "text"
    done = 0 if sequence is None else min(sequence.n_computed, sequence.n_prompt)
    state: SequenceState
    if sequence is None:
        state = "loading" if loading else "queued"
    elif seat is None:
        state = "waiting"
    else:
        state = "text" if choice.prompt_done else "prompt"
    return SequenceRow(
        request=job.number,
        index=choice.index,
        state=state,
        seat=seat,
        kind=kind,
        n_prompt=len(job.tokens),
        n_prompt_done=done,
        n_cached=0 if sequence is None else sequence.n_hit,
        n_decoded=len(choice.tokens),
        n_max=job.max_tokens,
        adapters=tuple((one.name, scale) for one, scale in job.scales.items()),
        params=choice.sampler.params,
        seed=choice.sampler.seed,
        age_s=now - job.submitted,
        has_new_line=any("\n" in piece for piece in choice.pieces),
    )
