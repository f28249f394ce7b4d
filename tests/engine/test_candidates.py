"""The ranking of logits, against sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.engine.candidates import ranked


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 63, 64, 65, 640, 1000, 5000]),
    n=st.integers(1, 200),
    n_values=st.sampled_from([1, 2, 40, 10_000]),
)
def test_it_is_the_sorted_beginning(seed: int, size: int, n: int, n_values: int) -> None:
    """Also with many equal logits, where the lower ids come first, and with forbidden ones."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-n_values, n_values, size).astype(np.float32)
    logits[rng.random(size) < 0.3] = -np.inf
    expected = np.argsort(-logits, kind="stable")[:n]
    assert ranked(logits, n).tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_do_not_end_it(bad: float) -> None:
    """Whoever asked finds them in the result; nothing is raised here."""
    logits = np.arange(1000, dtype=np.float32)
    logits[::3] = bad
    assert len(ranked(logits, 5)) <= 5
