"""The yardsticks measure what they say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.numerics.compare import as_near, greedy_agreement, max_abs, nmse, top_two_gap


def test_nmse_is_relative_to_the_expected_values() -> None:
    """A tenth of every value away is 0.01; equal is 0."""
    expected = np.arange(1.0, 9.0)
    assert nmse(expected, expected) == 0.0
    assert nmse(expected * 1.1, expected) == pytest.approx(0.01)
    assert max_abs(expected * 1.1, expected) == pytest.approx(0.8)


def test_values_that_are_no_numbers_never_pass() -> None:
    """NaN or infinity gives infinity; unlike shapes raise instead of broadcasting."""
    assert nmse([1.0, np.nan], [1.0, 1.0]) == float("inf")
    assert max_abs([1.0, np.inf], [1.0, 1.0]) == float("inf")
    with pytest.raises(ValueError, match="shapes differ"):
        nmse(np.ones((2, 1)), np.ones(2))


LOGITS = np.array([[0.0, 5.0, 1.0], [3.0, 0.0, 0.0], [2.0, 1.9, 0.0], [0.0, 0.0, 9.0]])


def test_as_near_wants_both_the_distance_and_the_neighbourhood() -> None:
    exact = np.array([1.0, 1.0])
    other = np.array([1.1, 1.0])
    assert as_near([1.0, 1.1], [1.1, 1.1], exact)
    assert as_near(other, other, exact)
    assert not as_near([1.12, 1.0], other, exact)  # 1.44 times as far
    assert not as_near([0.95, 0.95], other, exact)  # nearer, but further from `other` than it is
    assert not as_near([np.nan, 1.0], other, exact)


def test_top_two_gap() -> None:
    """The gap is between the two largest, wherever they stand."""
    assert top_two_gap(LOGITS) == pytest.approx([4.0, 3.0, 0.1, 9.0])


def test_agreement_ends_where_the_choice_is_open() -> None:
    """A difference behind the first undecided position does not count, one before it does."""
    late = greedy_agreement([1, 0, 1, 0], [1, 0, 0, 2], LOGITS, bound=0.06)
    assert (late.agrees, late.n_compared, late.ended_early) == (True, 2, True)
    decided = greedy_agreement([1, 0, 1, 0], [1, 0, 0, 2], LOGITS, bound=0.01)
    assert (decided.agrees, decided.n_equal, decided.n_compared) == (False, 2, 4)
    early = greedy_agreement([2, 0, 0, 2], [1, 0, 0, 2], LOGITS, bound=0.06)
    assert (early.agrees, early.n_equal) == (False, 0)
