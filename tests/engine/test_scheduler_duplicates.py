"""Tokens computed twice, for their logits: their cells come on top of those of the paths."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from typing import Any

import pytest

from loragraph.errors import CapacityError, ContextLengthError
from tests.engine.fakes import sequence_of
from tests.engine.test_scheduler import runner_of


def _score_beside_another(n_scored: int, budget: int, n_other: int, block: int, n_more: int) -> int:
    """Runs a prompt, then scores it again beside another one, in cells for both and `n_more`."""
    n_cells = n_scored + n_other + n_more
    runner = runner_of(
        n_cells, max_batch_tokens=budget, max_sequences=2, max_preemptions=0, block_size=block
    )
    tokens = [i % 3 for i in range(n_scored)]
    runner.scheduler.add(sequence_of(tokens, max_tokens=0))
    runner.finish_all()
    scored = sequence_of(tokens, max_tokens=0, logits_from=0)
    runner.scheduler.add(scored, sequence_of([5] * n_other, (0, "a"), max_tokens=0))
    n_steps = runner.finish_all()
    assert scored.finish_reason == "length"
    assert runner.scheduler.n_preemptions == 0
    return n_steps


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("n_more", [0, 1])
def test_duplicates_beside_a_protected_sequence(block: int, n_more: int) -> None:
    """Cells of duplicates come on top of the paths: who lacked them was said never to lack any."""
    for n_scored, budget, n_other in itertools.product((20, 33, 64), (4, 8, 11), (4, 8, 19)):
        assert _score_beside_another(n_scored, budget, n_other, block, n_more) > 0


@pytest.mark.parametrize(("max_preemptions", "seed"), [(0, 24), (0, 63), (1, 1), (2, 2)])
def test_scores_of_known_prompts_in_few_cells(max_preemptions: int, seed: int) -> None:
    """Random prompts of which some are scored, with texts that others have computed; all end."""
    rng = random.Random(seed)
    n_cells = rng.choice([32, 64, 96])
    runner = runner_of(
        n_cells,
        max_batch_tokens=rng.choice([8, 16, 32, 64]),
        max_sequences=rng.choice([2, 4, 8]),
        max_preemptions=max_preemptions,
        block_size=rng.choice([1, 4, 16, 32]),
    )
    texts = [[rng.randrange(3) for _ in range(rng.randrange(4, n_cells))] for _ in range(3)]
    for _ in range(150):
        tokens = rng.choice(texts)
        tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        fields: dict[str, Any] = {
            "max_tokens": rng.choice([0, 0, 1, 8]),
            "logits_from": rng.choice([None, 0, 0]),
        }
        with suppress(CapacityError, ContextLengthError):
            runner.scheduler.add(sequence_of(tokens, (0, rng.choice(["", "", "a"])), **fields))
        runner.step()
    runner.finish_all()
    assert runner.scheduler.stats.n_duplicate_tokens > 0
    assert runner.scheduler.stats.n_cells_in_use == 0


def test_cells_of_duplicates_are_counted_one_by_one() -> None:
    """Their runs were counted: a sequence was admitted to cells that were not free."""
    runner = runner_of(119, max_batch_tokens=11, max_sequences=2, max_preemptions=0, block_size=1)
    tokens = [i % 3 for i in range(100)]
    runner.scheduler.add(sequence_of(tokens, max_tokens=0))
    runner.finish_all()
    scored = sequence_of(tokens, max_tokens=0, logits_from=0)
    runner.scheduler.add(scored)
    runner.step()
    other = sequence_of([5] * 10, (0, "a"), max_tokens=0)
    runner.scheduler.add(other)
    plan = runner.scheduler.schedule()
    assert [chunk.duplicate for chunk in plan.chunks] == [True]
    assert not plan.admitted
    runner.run(plan)
    runner.scheduler.complete(plan)
    runner.finish_all()
    assert other.finish_reason == "length"
