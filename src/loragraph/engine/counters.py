"""What the core counts. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


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
