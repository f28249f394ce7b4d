"""What the core counts. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CoreStats:
    """Events since the start, and jobs of now."""

    n_submitted: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_aborted: int = 0
    n_steps: int = 0
    n_chunks: int = 0  # of all steps: a sequence's part of a step
    n_step_failures: int = 0
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    n_jobs: int = 0  # known now: waiting, loading or running
