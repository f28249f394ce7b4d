"""Verdicts of benchmarks: medians, bounds, and the better of a peer's forms."""

from __future__ import annotations

import pytest

from benchmarks.targets import Samples, Target, better, peers, verdicts


def test_samples_are_judged_by_their_median() -> None:
    """The best round counts for nothing."""
    assert Samples.of([5.0, 1.0, 2.0]) == Samples(2.0, 1.0, 5.0)
    with pytest.raises(ValueError, match="at least one"):
        Samples.of([])


@pytest.mark.parametrize(
    ("value", "low", "high", "met"),
    [
        (3.3, 3.3, None, True),
        (3.29, 3.3, None, False),
        (1.1, None, 1.1, True),
        (1.11, None, 1.1, False),
        (0.5, 0.4, 0.6, True),
        (0.7, 0.4, 0.6, False),
    ],
)
def test_a_bound_itself_is_met(
    value: float, low: float | None, high: float | None, met: bool
) -> None:
    """Bounds on either side."""
    target = Target("it", value, low=low, high=high)
    assert target.met is met
    assert str(target).endswith(": met" if met else ": NOT met")


def test_a_verdict_tells_what_was_asked_and_got() -> None:
    """One line each, and the count."""
    text = verdicts([Target("speed", 2.0, "times", low=3.0), Target("cost", 0.01, high=0.05)])
    assert text.splitlines() == [
        "asked speed: >= 3 times, got 2: NOT met",
        "asked cost: <= 0.05, got 0.01: met",
        "1 of 2 targets met",
    ]


def test_the_better_form_depends_on_the_figure() -> None:
    """Speed: the higher; time and memory: the lower. We are nobody's peer."""
    own = peers({"loragraph": 9.0, "llama-server": 3.0, "llama-server -kvu": 2.0})
    assert better(own, higher=True) == ("llama-server", 3.0)
    assert better(own, higher=False) == ("llama-server -kvu", 2.0)
