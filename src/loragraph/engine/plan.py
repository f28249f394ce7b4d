"""What the scheduler gives: its limits, the chunks of a step, and counts. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from loragraph.engine.blocks import BLOCK_SIZE, Run
from loragraph.engine.prefix_tree import Node
from loragraph.engine.sequence import Sequence
from loragraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets. A sequence's tokens, prompt and generated, never exceed `max_sequence_tokens`."""

    n_cells: int
    max_batch_tokens: int = 512
    max_sequences: int = 32
    max_waiting: int = 1024
    max_preemptions: int = 8
    max_sequence_tokens: int | None = None
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        least = {
            "n_cells": 1,
            "max_sequences": 1,
            # Every running sequence gets a token in every step: the proof that all end needs it.
            "max_batch_tokens": self.max_sequences,
            "max_waiting": 1,
            "max_preemptions": 0,
            "block_size": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"expected at least {low}, got {getattr(self, name)}", field=name)
        if self.max_sequence_tokens is not None and self.max_sequence_tokens < 1:
            raise ConfigError(
                f"expected at least 1, got {self.max_sequence_tokens}", field="max_sequence_tokens"
            )

    @property
    def sequence_limit(self) -> int:
        """Tokens of the longest sequence that can run at all."""
        return min(self.n_cells, self.max_sequence_tokens or self.n_cells)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence in this step, with a cell for each.

    The tree holds the tokens before `end` on the path of `node`. A duplicate chunk recomputes what
    the tree has: its rows see the path up to `start` and then their own cells, which are given back
    after the step.
    """

    sequence: Sequence
    start: int
    end: int
    tokens: list[int]  # of [start, end)
    runs: list[Run]  # the cells where their K and V are written
    node: Node
    duplicate: bool
    n_outputs: int  # tokens at the end whose logits, or states, count

    @property
    def wants_token(self) -> bool:
        """Whether its last logits give the sequence's next token, to be passed to `append`."""
        at_end = self.end == len(self.sequence.tokens)
        return at_end and self.n_outputs > 0 and self.sequence.max_tokens > 0

    @property
    def n_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one step, in the order of its rows, and who was put back for lack of cells."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens of the step."""
        return sum(chunk.n_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Sequences and cells of now, tokens and events since the start."""

    n_waiting: int
    n_running: int
    n_cells: int
    n_cells_used: int  # of the tree (used by a sequence or kept for later) and of duplicates
    n_cells_in_use: int  # on the paths of running sequences
    n_cells_shared: int  # on the paths of several
    fragmentation: float  # share of cells in begun blocks that nobody uses
    n_hit_tokens: int  # found in the tree instead of computed
    n_computed_tokens: int  # computed and kept
    n_duplicate_tokens: int  # computed although the tree had them, for their logits
    n_evicted_tokens: int
    n_admissions: int
    n_preemptions: int
