"""Scans, masses and draws of rows, against numpy, the C library's expf and libllama's own draw."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.kernels.library import ffi, forced_dispatch, instruction_sets, lib
from loragraph.kernels.sampling import (
    MASS_ERROR,
    LogitRow,
    MersenneTwister,
    alone,
    best_of_rows,
    draw_candidate,
)
from tests.oracle.libllama import low

Logits = npt.NDArray[np.float32]
WIDE = 151_936
_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU."""
    with forced_dispatch(request.param):
        yield request.param


def row_of(logits: Logits) -> LogitRow:
    """A row that has read them."""
    row = LogitRow(len(logits))
    alone(row.read(logits))
    return row


def window_of(logits: Logits) -> Any:
    """All of a row, at temperature 1."""
    x = ffi.from_buffer("float[]", logits)  # lives with the array, which the test holds
    edges = {"lo": -math.inf, "hi": math.inf, "max": float(logits.max()), "temperature": 1.0}
    return ffi.new("row_window *", {"x": x, "n": len(logits), **edges})


class Dist:
    """libllama's temperature and dist, over all candidates."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.chain = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
        low.llama_sampler_chain_add(self.chain, low.llama_sampler_init_temp(temperature))
        low.llama_sampler_chain_add(self.chain, low.llama_sampler_init_dist(seed))

    def draw(self, logits: Logits, ids: npt.NDArray[np.int64] | None = None) -> int:
        """One of the ids, all of them if there are none."""
        ids = np.arange(len(logits)) if ids is None else ids
        data = np.zeros(len(ids), _CANDIDATE)
        data["id"], data["logit"] = ids, logits[ids]
        pointer = data.ctypes.data_as(ctypes.POINTER(low.llama_token_data))
        array = low.llama_token_data_array(pointer, len(ids), -1, False)
        low.llama_sampler_apply(self.chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        """Frees it."""
        low.llama_sampler_free(self.chain)


def _rows() -> dict[str, Logits]:
    rng = np.random.default_rng(5)
    flat = rng.standard_normal(WIDE).astype(np.float32)
    two = np.full(WIDE, -30.0, np.float32)
    two[[3, 151_000]] = 20.0
    forbidden = flat * 4
    forbidden[rng.integers(0, WIDE, 100_000)] = -np.inf
    return {
        "flat": flat,
        "steep": flat * 6,
        "equal": np.zeros(WIDE, np.float32),
        "few values": rng.integers(0, 3, WIDE).astype(np.float32),
        "two": two,
        "forbidden": forbidden,
        "huge": flat * np.float32(1e30),
        "one": np.array([2.5], np.float32),
        "odd": flat[:1061] * 2,
        "first": flat[:64],
    }


ROWS = _rows()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.02, 1e4])
def test_draws_are_libllamas(isa: str, name: str, temperature: float) -> None:
    """The same token from the same seed, to the last bit of every sum, on any instruction set.

    The flat row has 150,000 boundaries, so that some of the draws need expf itself.
    """
    logits, random = ROWS[name], MersenneTwister(7)
    row, theirs = row_of(logits), Dist(temperature, 7)
    t = float(np.float32(temperature))
    try:
        for _ in range(30 if name == "flat" else 8 if len(logits) == WIDE else 100):
            assert alone(row.draw(random.uniform(), t)) == theirs.draw(logits)
    finally:
        theirs.close()


def test_a_window_is_a_smaller_array(isa: str) -> None:
    """Tokens on the bounds and outside of them are as if they were not there."""
    logits = ROWS["few values"].copy()
    logits[:5000] = np.linspace(0, 3, 5000, dtype=np.float32)
    row, random, theirs = row_of(logits), MersenneTwister(3), Dist(0.7, 3)
    ids = np.flatnonzero((logits > 1) & (logits < 2.5))
    peak = float(logits[ids].max())
    try:
        for _ in range(60):
            ours = alone(row.draw(random.uniform(), float(np.float32(0.7)), 1.0, 2.5, peak))
            assert ours == theirs.draw(logits, ids)
    finally:
        theirs.close()
    assert alone(row.draw(0.5, 1.0, 4.0)) == -1


def test_the_ends_of_the_mass(isa: str) -> None:
    """0 is the first token of the window, the largest number below 1 the last with any weight."""
    logits = ROWS["flat"]
    row = row_of(logits)
    assert alone(row.draw(0.0, 1.0)) == 0
    assert alone(row.draw(0.0, 1.0, 1.0)) == int(np.flatnonzero(logits > 1)[0])
    assert alone(row.draw(1 - 2**-53, 1.0)) == WIDE - 1
    equal = row_of(np.zeros(4096, np.float32))  # on a boundary the sum reaches the share
    assert [alone(equal.draw(share, 0.7)) for share in (0.25, 0.5, 0.75)] == [1023, 2047, 3071]


@pytest.mark.parametrize("name", ["flat", "steep", "forbidden", "few values", "two", "one"])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
def test_typical_tokens_depend_on_no_instruction_set(name: str, temperature: float) -> None:
    """Nor do they lie outside the window."""
    logits = ROWS[name]
    lo = float(np.float32(logits.max() - 9))
    found = []
    for one in instruction_sets():
        with forced_dispatch(one):
            row, random = row_of(logits), MersenneTwister(11)
            draws = [row.typical(p, random, temperature, lo) for p in (0.9, 0.5, 0.1, 0.0) * 5]
            found.append([alone(draw) for draw in draws])
    assert all(tokens == found[0] for tokens in found)
    assert all(logits[token] > lo for token in found[0])


def test_a_temperature_that_overflows(isa: str) -> None:
    """The best takes it all where libllama's division leaves no number."""
    logits = ROWS["huge"].copy()
    logits[77] = 3e38
    assert alone(row_of(logits).draw(0.9, 1e-5)) == 77
    assert alone(row_of(-logits - np.float32(1e33)).draw(0.5, 1e-5)) >= 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 2), n=st.integers(1, 50), scale=st.sampled_from([0.0, 1.0, 40]))
def test_draws_among_candidates_are_libllamas(seed: int, n: int, scale: float) -> None:
    """For any seed and any number of candidates, in their order."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n) * scale).astype(np.float32)
    data = np.zeros(n, _CANDIDATE)
    data["id"], data["logit"] = np.arange(n), logits
    random, theirs = MersenneTwister(seed), Dist(1.0, seed)
    try:
        for _ in range(5):
            assert draw_candidate(data.ctypes.data, n, random.uniform()) == theirs.draw(logits)
    finally:
        theirs.close()


def test_random_numbers() -> None:
    """numpy's Mersenne Twister, two words a number; more than one round of the state."""
    words = np.random.RandomState(123)
    random = MersenneTwister(123)
    for i in range(700):
        low_word, high = (int(words.randint(0, 2**32, dtype=np.uint64)) for _ in range(2))
        assert random.uniform() == (low_word + high * 2**32) / 2**64
        if i == 350:
            clone = random.clone()
    assert clone.uniform() != random.uniform()
    random.reset()
    assert random.uniform() == MersenneTwister(123).uniform()


def test_exact_weights_are_expf(isa: str) -> None:
    """To the bit, from 0 to where floats end."""
    libm = ctypes.CDLL(None)
    libm.expf.restype, libm.expf.argtypes = ctypes.c_float, [ctypes.c_float]
    rng = np.random.default_rng(1)
    ends = [-86.99, -87.0, -87.5, -103.9, -104.0, -104.1, -1e30]
    logits = np.concatenate([[0.0], -rng.random(400), -110 * rng.random(400), ends])
    logits = logits.astype(np.float32)
    row = row_of(logits)
    for value in logits:
        lo, hi = (float(np.nextafter(value, np.float32(end))) for end in (-np.inf, np.inf))
        count = int((logits == value).sum())
        assert alone(row.mass(lo, hi, exact=True)) == count * libm.expf(float(value))
    window = window_of(logits)
    peak = np.float32(-20.0)  # exponents of what lies outside are above 0
    window.lo, window.hi, window.max = -50.0, np.nextafter(peak, np.float32(0)), peak
    values = logits[(logits > -50) & (logits <= peak)]
    for temperature in np.array([0.3, 1.0, 1.7], np.float32):
        window.temperature = temperature
        exponents = values / temperature - peak / temperature
        expected = sum(libm.expf(float(one)) for one in exponents)
        assert lib.loragraph_row_mass(window, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["flat", "steep", "forbidden", "few values", "two", "one"])
def test_masses(isa: str, name: str) -> None:
    """Within the stated error of numpy's in F64; exact ones within F32 roundings of each weight."""
    logits = ROWS[name]
    row = row_of(logits)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    for lo, hi in ((-math.inf, math.inf), (-1.0, math.inf), (-0.5, 0.5), (50.0, math.inf)):
        inside = (logits > lo) & (logits < hi)
        expected = weights[inside].sum()
        assert abs(alone(row.mass(lo, hi)) - expected) <= 1.1 * MASS_ERROR * expected
        assert abs(alone(row.mass(lo, hi, exact=True)) - expected) <= 6.1e-8 * expected
    spread = np.where(weights > 0, logits - logits.max(), 0).astype(np.float64)
    sums = ffi.new("double[2]")
    lib.loragraph_row_means(window_of(logits), sums)
    assert sums[0] == pytest.approx(weights.sum(), rel=1e-6)
    mean = (weights * spread).sum() / weights.sum()
    assert logits.max() + sums[1] / sums[0] == pytest.approx(logits.max() + mean, rel=1e-5)
    kept = logits[logits > -np.inf].astype(np.float64)
    assert alone(row.deviation()) == pytest.approx(kept.std(), rel=1e-6, abs=1e-6)


def test_an_estimate(isa: str) -> None:
    """Near the mass where no single token counts; all of it in a row of one block."""
    for name, rel in (("flat", 0.05), ("few values", 0.05), ("first", 1e-6)):
        row = row_of(ROWS[name])
        assert alone(row.estimate()) == pytest.approx(alone(row.mass()), rel=rel)
    assert alone(row.estimate(1.0)) == pytest.approx(alone(row.mass(1.0)), rel=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_mass_before_a_token(isa: str, exact: bool) -> None:
    """Tokens on the bounds count up to the given id, those inside always."""
    logits = ROWS["few values"]
    row = row_of(logits)
    weights = np.exp(logits.astype(np.float64) - 2)
    for token in (0, 1, 1023, 1024, 70_000, WIDE - 1):
        before = np.arange(WIDE) < token
        for lo, hi in ((1.0, math.inf), (0.0, 2.0), (2.0, math.inf)):
            edge = ((logits == lo) | (logits == hi)) & before
            expected = weights[((logits > lo) & (logits < hi)) | edge].sum()
            found, others = alone(row.split(token, lo, hi, -0.5, exact=exact))
            assert abs(found - expected) <= 1.1 * MASS_ERROR * expected
            assert found + others == pytest.approx(weights.sum(), rel=1.1 * MASS_ERROR)
            early, others = alone(
                row.split(token, lo, hi, most=found / 9, rest=others / 9, exact=exact)
            )
            assert early <= found
            assert early >= found / 9 or others > 0


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 700), n_values=st.sampled_from([1, 3, 10**6]), seed=st.integers(0, 999))
def test_scans(n: int, n_values: int, seed: int) -> None:
    """Maximum, its lowest id, the best k; and after changes too, on every instruction set."""
    rng = np.random.default_rng(seed)
    values = (rng.integers(0, n_values, n) / 7 - 3).astype(np.float32)
    for name in instruction_sets():
        with forced_dispatch(name):
            logits = values.copy()
            row = row_of(logits)
            some = rng.integers(0, n, 5)
            for _ in range(2):
                assert row.finite
                assert row.max == logits.max()
                assert row.best == logits.argmax()
                below = logits[logits < row.max]
                found = lib.loragraph_row_max_below(window_of(logits).x, n, row.max)
                assert found == (below.max() if len(below) else -math.inf)
                order = np.lexsort((np.arange(n), -logits))
                assert np.array_equal(alone(row.top(9)), order[:9])
                logits[some] = rng.standard_normal(5)
                logits[some[0]] = -np.inf
                alone(row.changed(some))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("k", [1, 40, 65, 256, 2000])
def test_the_best_of_wide_rows(name: str, k: int) -> None:
    """As a stable sort: of one block, of equal values, of a few far above the rest, of -inf."""
    logits = ROWS[name]
    order = np.lexsort((np.arange(len(logits)), -logits))
    assert np.array_equal(alone(row_of(logits).top(k)), order[:k])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("at", [0, 63, 64, 700, 1060])
def test_what_is_not_finite_is_seen(isa: str, bad: float, at: int) -> None:
    """Wherever it stands, alone or in a batch of rows."""
    logits = ROWS["odd"].copy()
    logits[at] = bad
    assert not row_of(logits).finite
    table = np.stack([ROWS["odd"], logits, ROWS["odd"]])
    best, finite = best_of_rows(table, [2, 1, 0, 0])
    assert finite == [True, False, True, True]
    assert {best[i] for i in (0, 2, 3)} == {int(ROWS["odd"].argmax())}


def test_rows_of_a_view(isa: str) -> None:
    """Rows may be parts of longer ones; other views are copied."""
    table = np.random.default_rng(2).standard_normal((4, 300)).astype(np.float32)
    for view in (table[:, :200], table[::2], table[:, ::3], table.T):
        best, finite = best_of_rows(view, range(len(view)))
        assert best == view.argmax(1).tolist()
        assert all(finite)
