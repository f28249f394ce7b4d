"""Canonical mixes, without any file: an adapter is only its digest here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.errors import InvalidRequestError


@dataclass(frozen=True, eq=False)
class Fake:
    """Stands for an adapter."""

    digest: str


def mix(pairs: list[tuple[Any, float]]) -> Mix:
    """A mix of fakes, in the order given."""
    return Mix(dict(pairs))


SCALES = st.floats(-(2.0**100), 2.0**100, width=32)
CONTENTS = st.lists(st.tuples(st.sampled_from("abcd"), SCALES), max_size=6)


@given(CONTENTS, st.randoms(use_true_random=False))
def test_key_does_not_depend_on_order(contents: list[tuple[str, float]], random: Any) -> None:
    """Equal sets give equal keys, hashes and order of adapters, whatever came first."""
    pairs = [(Fake(digest), scale) for digest, scale in contents]
    shuffled = pairs.copy()
    random.shuffle(shuffled)
    first, second = mix(pairs), mix(shuffled)
    assert first == second
    assert hash(first) == hash(second)
    assert first.key == second.key
    assert [a.digest for a in first.adapters] == [digest for digest, _ in first.key]


@given(CONTENTS)
def test_key_is_canonical(contents: list[tuple[str, float]]) -> None:
    """Digests are distinct and sorted, scales f32, finite and not 0; sums are those of parts."""
    made = mix([(Fake(digest), scale) for digest, scale in contents])
    digests = [digest for digest, _ in made.key]
    assert digests == sorted(set(digests))
    for digest, scale in made.key:
        assert scale != 0
        assert math.isfinite(scale)
        assert float(np.float32(scale)) == scale
        parts = [part for name, part in contents if name == digest]
        assert scale == float(np.float32(math.fsum(parts)))
    assert mix(list(made)) == made


@given(st.sampled_from("ab"), SCALES)
def test_two_names_for_one_content_sum(digest: str, scale: float) -> None:
    """Equal digests are one adapter; opposite scales are the base."""
    assert mix([(Fake(digest), scale), (Fake(digest), -scale)]) == EMPTY_MIX


def test_zero_scales_are_the_base() -> None:
    """0, -0, what underflows f32, and nothing at all are the base model."""
    assert mix([(Fake("a"), 0.0), (Fake("b"), -0.0), (Fake("c"), 1e-60)]) == EMPTY_MIX == Mix()
    assert len(EMPTY_MIX) == 0
    assert EMPTY_MIX.key == ()


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, 10**400, "1", None, True])
def test_scale_that_is_no_finite_f32_is_refused(scale: Any) -> None:
    """Non-finite scales and other types are the caller's error."""
    with pytest.raises(InvalidRequestError, match="scale") as caught:
        mix([(Fake("a"), scale)])
    assert caught.value.param == "scale"


def test_sum_that_overflows_is_refused() -> None:
    """A sum of equal digests beyond f32 is refused too."""
    with pytest.raises(InvalidRequestError, match="within f32"):
        mix([(Fake("a"), 3e38), (Fake("a"), 3e38)])


def test_integers_and_numpy_scales() -> None:
    """Any real number is a scale."""
    assert mix([(Fake("a"), 2)]).key == mix([(Fake("a"), np.float64(2))]).key == (("a", 2.0),)


def test_mix_differs_from_other_things() -> None:
    """A mix is never equal to something else, and says what it holds."""
    assert Mix() != ()
    assert repr(mix([(Fake("abcdefghij"), 0.5)])) == "Mix({abcdefgh: 0.5})"
