"""What metrics and logs say of a request that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from loragraph.engine.counters import Gaps
from loragraph.engine.request import Result
from loragraph.errors import DeadlineError
from loragraph.server.runs import Run


@dataclass(frozen=True, slots=True)
class Served:
    """A request to the engine at its end."""

    adapters: tuple[str, ...] = ()  # names; (): the base
    outcome: str = "stop"  # the first choice's finish reason, "embedding", "abort" or "error"
    n_prompt: int = 0
    n_cached: int = 0  # of the prompt
    n_generated: int = 0  # in all choices
    n_longest: int = 0  # tokens of its longest choice, with the prompt
    queued_s: float | None = None  # None: it got no further
    prompt_s: float | None = None
    decode_s: float | None = None
    gaps: Gaps | None = None  # between its tokens


def served_of(run: Run) -> Served:
    """A run's numbers. One that was left, or failed, has those that are known here."""
    names = tuple(name for name, scale in run.mix.scales.items() if scale != 0)
    if run.embedding is not None:
        found = run.embedding
        return Served(
            names,
            "embedding",
            n_prompt=found.n_prompt,
            n_cached=found.n_cached,
            n_longest=found.n_prompt,
            queued_s=found.timings.queued_s,
            prompt_s=found.timings.prompt_s,
        )
    result = run.result
    if result is None and isinstance(run.error, DeadlineError):
        result = run.error.result if isinstance(run.error.result, Result) else None
    if result is None:
        outcome = "error" if run.error is not None else "abort"
        return Served(names, outcome, n_generated=run.n_events)
    lengths = [len(choice.tokens) for choice in result.choices]
    outcome = result.finish_reason if run.error is None else "error"
    timings = result.timings
    return Served(
        names,
        outcome,
        n_prompt=result.n_prompt,
        n_cached=result.n_cached,
        n_generated=sum(lengths),
        n_longest=result.n_prompt + max(lengths, default=0),
        queued_s=timings.queued_s,
        prompt_s=timings.prompt_s,
        decode_s=timings.decode_s,
        gaps=timings.gaps,
    )
