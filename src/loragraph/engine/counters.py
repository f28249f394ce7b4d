"""What the core counts. Pure data."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds, seconds, by which the gaps between a request's tokens are counted."""


@dataclass(slots=True)
class Gaps:
    """Gaps between tokens, by the first bound that they do not exceed; the last has none."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect_left(GAP_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class CoreStats:
    """Events since the start, and jobs of now.

    Seconds are of sequences, so several pass at once: what a request waits for its prompt, and for
    its tokens after the first, summed over all. They and the tokens are counted as they come.
    """

    n_submitted: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_aborted: int = 0
    n_steps: int = 0
    n_step_failures: int = 0
    n_step_sequences: int = 0  # summed over the steps
    n_prompt_tokens: int = 0  # of prompts that are done, one for each choice
    n_prompt_tokens_cached: int = 0  # of these, found in the prefix tree
    n_generated_tokens: int = 0
    n_tokens_max: int = 0  # of the longest sequence, prompt and text
    prompt_s: float = 0.0
    decode_s: float = 0.0
    n_jobs: int = 0  # known now: waiting, loading or running
    n_jobs_waiting: int = 0  # for a seat, or for room for their adapters
    n_jobs_loading: int = 0  # for adapters that are on their way
    n_jobs_running: int = 0

    @property
    def n_prompt_tokens_computed(self) -> int:
        """Of prompts that are done, what was not in the prefix tree."""
        return self.n_prompt_tokens - self.n_prompt_tokens_cached
