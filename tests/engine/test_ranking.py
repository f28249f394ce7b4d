"""The largest logits, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.engine.ranking import ranked


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 20_000),
    n=st.integers(1, 3000),
    n_values=st.sampled_from((1, 2, 50, 10**6)),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_a_stable_sort(size: int, n: int, n_values: int, seed: int) -> None:
    """The first n of all ids, sorted by falling logit and then by id, for many equal values too."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, n_values, size) / 7 - 3).astype(np.float32)
    expected = np.lexsort((np.arange(size), -logits))[:n]

    assert np.array_equal(ranked(logits, n), expected)


def test_the_rest_of_the_groups_counts() -> None:
    """The largest may stand behind the last whole group."""
    logits = np.zeros(5000, np.float32)
    logits[-1], logits[3] = 2, 1

    assert ranked(logits, 3).tolist() == [4999, 3, 0]


def test_forbidden_tokens_come_last() -> None:
    """-inf is a value like others."""
    logits = np.full(10_000, -np.inf, np.float32)
    logits[[70, 9_999]] = (1, 2)

    assert ranked(logits, 4).tolist() == [9_999, 70, 0, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_do_not_end_it(bad: float) -> None:
    """Whoever asked finds them in the result; nothing is raised here."""
    logits = np.arange(1000, dtype=np.float32)
    logits[::3] = bad
    assert len(ranked(logits, 5)) <= 5


def test_nothing_to_rank() -> None:
    """No logits have no best ones."""
    assert len(ranked(np.empty(0, np.float32), 3)) == 0
