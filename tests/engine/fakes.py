"""A runner without a model: a cell's content names all that it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.batching import batch_of
from loragraph.engine.plan import StepPlan
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.sequence import Segment, Sequence
from loragraph.graph.batch import Batch
from loragraph.graph.stretches import mask_from


class FakeAdapter:
    """All that a Mix needs of an adapter."""

    def __init__(self, digest: str) -> None:
        self.digest = digest


def mix_of(scales: Mapping[str, float] | str = "") -> Mix:
    """A mix of fake adapters; "ab" is a and b at scale 1."""
    if not scales:
        return EMPTY_MIX
    named = dict.fromkeys(scales, 1.0) if isinstance(scales, str) else scales
    return Mix(cast(Any, {FakeAdapter(name): scale for name, scale in named.items()}))


_ids = iter(range(10**9))


def sequence_of(
    tokens: list[int], *segments: tuple[int, str], max_tokens: int = 4, **fields: Any
) -> Sequence:
    """A sequence over fake adapters; segments are (start, adapter letters)."""
    parts = tuple(Segment(start, mix_of(letters)) for start, letters in segments or [(0, "")])
    return Sequence(next(_ids), list(tokens), len(tokens), parts, max_tokens, **fields)


def contents_of(sequence: Sequence) -> list[int]:
    """What a cold start computes for each token: (salt, mix, token, content before) as a hash."""
    contents: list[int] = []
    content = 0
    for i, token in enumerate(sequence.tokens):
        content = hash((sequence.salt, sequence.mix_at(i).key, token, content))
        contents.append(content)
    return contents


def next_token(content: int, n_vocab: int = 3) -> int:
    """The greedy choice after a content; few tokens, so that sequences often agree."""
    return content % n_vocab


class FakeRunner:
    """Computes cells from the cells that a row sees, and checks each against a cold start."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.contents: dict[int, int] = {}

    def run(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """The plan's next tokens; asserts that every row sees its history and nothing else."""
        batch = batch_of(plan)
        seen = self._seen(batch)
        rows = [(chunk, i) for chunk in plan.chunks for i in range(chunk.start, chunk.end)]
        assert len(rows) == batch.n_tokens == len(set(batch.cells.tolist()))
        expected = {chunk.sequence: contents_of(chunk.sequence) for chunk in plan.chunks}
        for row in np.argsort(batch.positions, kind="stable").tolist():
            chunk, i = rows[row]
            assert batch.positions[row] == i
            assert batch.tokens[row] == chunk.sequence.tokens[i]
            assert batch.mixes[batch.mix[row]] == chunk.sequence.mix_at(i)
            history = [self.contents[cell] for cell in seen[row][:-1]]
            assert history == expected[chunk.sequence][:i], "a row sees other cells than its own"
            assert seen[row][-1] == batch.cells[row], "a row does not see itself"
            before = history[-1] if history else 0
            key = (chunk.sequence.salt, batch.mixes[batch.mix[row]].key)
            self.contents[seen[row][-1]] = hash((*key, int(batch.tokens[row]), before))
        return [
            (chunk.sequence, next_token(expected[chunk.sequence][chunk.end - 1]))
            for chunk in plan.chunks
            if chunk.wants_token
        ]

    def step(self, **options: Any) -> StepPlan:
        """One whole step of the scheduler."""
        plan = self.scheduler.schedule(**options)
        tokens = self.run(plan)
        self.scheduler.complete(plan)
        for sequence, token in tokens:
            self.scheduler.append(sequence, token)
        return plan

    def finish_all(self, n_steps: int = 10_000) -> int:
        """Steps until nothing is left; how many it took."""
        for n in range(n_steps):
            if not self.scheduler.running and not self.scheduler.n_waiting:
                return n
            self.step()
        raise AssertionError(f"sequences are left after {n_steps} steps")

    def _seen(self, batch: Batch) -> list[list[int]]:
        """The cells that each row sees in the order of their positions, without a gap."""
        stretches = batch.stretches
        found: list[list[tuple[int, int]]] = [[] for _ in range(batch.n_tokens)]
        for s in range(stretches.n_stretches):
            cells = stretches.cells(s).tolist()
            for i in range(stretches.row_ptr[s], stretches.row_ptr[s + 1]):
                begin, end = int(stretches.row_begin[i]), int(stretches.row_end[i])
                assert 0 <= begin < end <= len(cells)
                for offset in range(begin, end):
                    place = (int(stretches.first[s]) + offset, cells[offset])
                    found[stretches.row[i]].append(place)
        mask = mask_from(stretches, batch.n_tokens, self.scheduler.config.n_cells)
        for row, places in enumerate(found):
            places.sort()
            assert [position for position, _ in places] == list(range(batch.positions[row] + 1))
            assert set(np.flatnonzero(mask[row]).tolist()) == {cell for _, cell in places}
        return [[cell for _, cell in places] for places in found]
