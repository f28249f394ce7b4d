"""The draw without top-k over a wide vocabulary: its candidates, and libllama's own choices."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loragraph.engine import draw
from loragraph.engine.draw import RowDraw
from loragraph.engine.params import SamplingParams
from loragraph.engine.sampler import Sampler
from loragraph.ggml.lib import Library
from loragraph.kernels.sampling import LogitRow, MersenneTwister, alone
from loragraph.vocab.vocab import Vocab
from tests.oracle.libllama import low

Logits = npt.NDArray[np.float32]
WIDE = 151_936
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def flat(seed: int = 1) -> Logits:
    """Logits whose nucleus is most of the vocabulary."""
    return np.random.default_rng(seed).standard_normal(WIDE).astype(np.float32)


def steep(seed: int = 1) -> Logits:
    """Logits as a model's: a few hundred tokens share nearly everything."""
    logits = flat(seed) * 2
    rng = np.random.default_rng(seed + 1)
    logits[rng.integers(0, WIDE, 40)] += 14
    return logits


def drawn(lib: Library, logits: Logits, n: int, **params: Any) -> list[int]:
    """`n` tokens of one sampler's draw."""
    one = RowDraw(lib, SamplingParams(**params), MersenneTwister(params.get("seed", 1)))
    row = LogitRow(len(logits))
    alone(row.read(logits))
    try:
        return [alone(one.of_row(logits, row)) for _ in range(n)]
    finally:
        one.close()


def libllamas(logits: Logits, n: int, **params: Any) -> list[int]:
    """The same of libllama's chain over all candidates."""
    p = SamplingParams(**params)
    seed = params.get("seed", 1)
    chain = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
    for part in (
        low.llama_sampler_init_top_n_sigma(p.top_n_sigma),
        low.llama_sampler_init_typical(p.typical_p, 0),
        low.llama_sampler_init_top_p(p.top_p, 0),
        low.llama_sampler_init_min_p(p.min_p, 0),
        low.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, 0, seed),
        low.llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent),
        low.llama_sampler_init_dist(seed),
    ):
        low.llama_sampler_chain_add(chain, part)
    found = []
    for _ in range(n):
        data = np.zeros(len(logits), _CANDIDATE)
        data["id"], data["logit"] = np.arange(len(logits)), logits
        pointer = data.ctypes.data_as(ctypes.POINTER(low.llama_token_data))
        array = low.llama_token_data_array(pointer, len(logits), -1, False)
        low.llama_sampler_apply(chain, ctypes.byref(array))
        found.append(int(array.data[array.selected].id))
    low.llama_sampler_free(chain)
    return found


@pytest.mark.parametrize("make", [flat, steep])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"min_p": 0.05, "temperature": 0.8},
        {"min_p": 1.0},
        {"top_n_sigma": 1.5, "temperature": 1.3},
        {"min_p": 0.2, "xtc_probability": 0.5, "xtc_threshold": 0.01},
        {"min_p": 0.1, "dynatemp_range": 0.5},
        {"top_n_sigma": 1.0, "min_p": 0.01},
    ],
    ids=str,
)
def test_draws_are_libllamas(lib: Library, make: Any, params: dict[str, Any]) -> None:
    """The same tokens from the same seed."""
    fields = {**OFF, **params, "seed": 9}
    logits = make()
    assert drawn(lib, logits, 25, **fields) == libllamas(logits, 25, **fields)


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.7},
        {"top_p": 0.95, "min_p": 0.02, "temperature": 1.4},
        {"top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"top_p": 0.0},
        {"top_p": 0.8, "dynatemp_range": 0.4},
    ],
    ids=str,
)
def test_a_small_nucleus_is_libllamas(lib: Library, params: dict[str, Any]) -> None:
    """The same tokens: libllama's F32 sum of these logits moves the cut by no token."""
    fields = {**OFF, **params, "seed": 4}
    assert drawn(lib, steep(), 40, **fields) == libllamas(steep(), 40, **fields)


def _nucleus(logits: Logits, top_p: float) -> set[int]:
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    n = int(np.searchsorted(weights.cumsum(), top_p * weights.sum())) + 1
    return set(order[:n].tolist())


def _typical(logits: Logits, typical_p: float) -> set[int]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    p = weights / weights.sum()
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    with np.errstate(divide="ignore"):
        far = np.abs(-np.log(p) - entropy)
    order = np.argsort(far, kind="stable")
    n = int(np.searchsorted(p[order].cumsum(), typical_p, side="right")) + 1
    return set(order[:n].tolist())


def _check_shares(
    draws: list[int], logits: Logits, kept: set[int], temperature: float, n_groups: int = 20
) -> None:
    """All draws are kept ones, and about as often in groups of ids as their weights say."""
    ids = np.array(sorted(kept))
    assert set(draws) <= kept
    weights = np.exp((logits[ids].astype(np.float64) - logits[ids].max()) / temperature)
    shares = weights / weights.sum()
    for group in np.array_split(np.arange(len(ids)), n_groups):
        share = shares[group].sum()
        count = np.isin(draws, ids[group]).sum()
        bound = 5 * math.sqrt(len(draws) * share * (1 - share)) + 1
        assert abs(count - len(draws) * share) <= bound


@pytest.mark.parametrize("top_p", [0.95, 0.5, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_a_large_nucleus(lib: Library, top_p: float, temperature: float) -> None:
    """Exactly the smallest set of that mass, each token by its weight; fixed seeds."""
    logits = flat(3)
    fields = {**OFF, "top_p": top_p, "temperature": temperature, "seed": 2}
    kept = _nucleus(logits, top_p)
    assert len(kept) > 1000
    _check_shares(drawn(lib, logits, 500, **fields), logits, kept, temperature)


def test_a_large_nucleus_before_xtc(lib: Library) -> None:
    """Is libllama's, over all candidates."""
    fields = {**OFF, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.0, "seed": 5}
    assert drawn(lib, flat()[:20_000], 5, **fields) == libllamas(flat()[:20_000], 5, **fields)


def test_the_edge_of_a_nucleus_is_exact(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with exactly the mass top_p in front of it is out."""
    monkeypatch.setattr(draw, "_FEW", 1)
    equal = np.full(4, 3.0, np.float32)
    assert set(drawn(lib, equal, 60, **{**OFF, "top_p": 0.5}, seed=1)) == {0, 1}
    assert set(drawn(lib, equal, 60, **{**OFF, "top_p": 0.75}, seed=1)) == {0, 1, 2}


def test_sigma_of_numbers_that_overflow(lib: Library) -> None:
    """An infinite deviation, as libllama's, masks nothing."""
    logits = flat(1)[:500] * np.float32(1e38)
    fields = {**OFF, "top_n_sigma": 1e-3, "temperature": 1e4, "typical_p": 0.9, "seed": 1}
    assert all(0 <= token < 500 for token in drawn(lib, logits, 20, **fields))
    fields["typical_p"] = 1.0
    assert drawn(lib, logits, 20, **fields) == libllamas(logits, 20, **fields)


def test_equal_tokens_at_the_nucleus_edge(lib: Library) -> None:
    """The lower ids are in: half of the mass of equal tokens is the lower half of them."""
    logits = np.zeros(4000, np.float32)
    draws = drawn(lib, logits, 400, **{**OFF, "top_p": 0.5}, seed=3)
    _check_shares(draws, logits, set(range(2000)), 1.0)
    logits[1000:1300] = 1.0  # and where better ones lead
    kept = _nucleus(logits, 0.6)
    _check_shares(drawn(lib, logits, 400, **{**OFF, "top_p": 0.6}, seed=3), logits, kept, 1.0)


@pytest.mark.parametrize("typical_p", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("make", [flat, steep])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.1, 1.7])
def test_typical(lib: Library, make: Any, typical_p: float, temperature: float) -> None:
    """The tokens nearest to the mean logit, also where the most likely ones are too far from it."""
    logits = make(5)
    kept = _typical(logits, typical_p)
    draws = drawn(
        lib, logits, 100, **{**OFF, "typical_p": typical_p, "temperature": temperature}, seed=6
    )
    _check_shares(draws, logits, kept, temperature, 5)


@pytest.mark.parametrize("typical_p", [0.0, 1e-6, 0.25])
def test_typical_among_many_equal_tokens_takes_few_draws(lib: Library, typical_p: float) -> None:
    """It drew until one of the lowest ids came: of 151,936 equal tokens, for minutes."""
    logits = np.zeros(WIDE, np.float32)
    logits[::2] = 1.0
    kept = _typical(logits, typical_p)
    fields = {**OFF, "typical_p": typical_p, "temperature": 0.7}
    draws = drawn(lib, logits, 60, **fields, seed=1)
    _check_shares(draws, logits, kept, 0.7, min(4, len(kept)))


def test_typical_with_equal_tokens(lib: Library) -> None:
    """Two equal best ones that are not typical are never drawn, however low the temperature."""
    logits = np.zeros(5000, np.float32)
    logits[[10, 20]] = 6.0
    kept = _typical(logits, 0.2)
    assert not kept & {10, 20}
    fields = {**OFF, "typical_p": 0.2, "temperature": 0.01}
    assert set(drawn(lib, logits, 100, **fields, seed=1)) <= set(range(5000)) - {10, 20}


@pytest.mark.parametrize("typical_p", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("temperature", [1e-6, 0.02])
def test_typical_where_the_likely_ones_are_far_takes_few_draws(
    lib: Library, typical_p: float, temperature: float
) -> None:
    """It left out one token after another from the best down, for seconds."""
    logits = flat(9)
    kept = _typical(logits, typical_p)
    fields = {**OFF, "typical_p": typical_p, "temperature": temperature}
    draws = drawn(lib, logits, 40, **fields, seed=1)
    _check_shares(draws, logits, kept, temperature, 4)


def test_typical_beside_tokens_on_the_bound(lib: Library) -> None:
    """top-n-sigma leaves out those on its bound itself: they counted as nearer than others."""
    counts = {1.0: 10_000, 1.5: 1000, 3.0: 20, 3.5: 20}
    logits = np.concatenate([np.full(n, logit, np.float32) for logit, n in counts.items()])
    row = LogitRow(len(logits))
    alone(row.read(logits))
    above = float(np.nextafter(np.float32(1), np.float32(2)))
    sigma = (3.5 - above) / alone(row.deviation())
    assert alone(draw.sigma_bound(row, sigma)) == 1.0
    inside = _typical(np.where(logits > 1, logits, -np.inf).astype(np.float32), 0.93)
    fields = {**OFF, "typical_p": 0.93, "top_n_sigma": sigma}
    draws = drawn(lib, logits, 1000, **fields, seed=3)
    _check_shares(draws, logits, inside, 1.0, 4)


@pytest.mark.parametrize("typical_p", [0.001, 0.02])
def test_typical_draws_that_are_seldom_near(lib: Library, typical_p: float) -> None:
    """98 % of the mass is further from the mean than one that was refused, draw after draw."""
    counts = {1.0: 1000, -1.0: 7389, 0.5: 15, -0.5: 41, 0.0: 8}
    logits = np.concatenate([np.full(n, logit, np.float32) for logit, n in counts.items()])
    logits = np.random.default_rng(4).permutation(logits)
    kept = _typical(logits, typical_p)
    draws = drawn(lib, logits, 400, **{**OFF, "typical_p": typical_p}, seed=8)
    _check_shares(draws, logits, kept, 1.0, 4)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_n_sigma": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e4])
def test_extremes(lib: Library, params: dict[str, Any], temperature: float) -> None:
    """Two hot tokens among 151,936, one token, all equal, steep: a token that has weight."""
    two = np.full(WIDE, -50.0, np.float32)
    two[[7, 150_000]] = (30.0, 30.0)
    one = np.array([3.0], np.float32)
    equal = np.full(1000, -7.0, np.float32)
    fields = {**OFF, **params, "temperature": temperature, "seed": 1}
    for logits, allowed in ((two, {7, 150_000}), (one, {0}), (equal, set(range(1000)))):
        found = set(drawn(lib, logits, 10, **fields))
        if temperature < 1 or params.get("top_p"):
            assert found <= allowed
    for size in (1e-30, 1e30):
        logits = flat(2)[:3000] * np.float32(size)
        for token in drawn(lib, logits, 5, **fields):
            assert 0 <= token < 3000
    if temperature == 1e-6 and "typical_p" not in params:
        assert set(drawn(lib, flat(2), 5, **fields)) == {int(flat(2).argmax())}


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.4}, {"top_k": 5}], ids=str
)
def test_bias_leaves_no_trace(bpe: Vocab, params: dict[str, Any]) -> None:
    """Forbidden tokens are never drawn, and the logits are as before, also those of a failed call.

    Those that cannot be written to are copied.
    """
    logits = flat(4)[: bpe.n_tokens]
    before = logits.copy()
    forbidden = dict.fromkeys(range(330), -math.inf) | {335: 2.5}
    fields: dict[str, Any] = {**OFF, "top_k": 0, **params, "logit_bias": forbidden, "seed": 1}
    with Sampler(bpe, SamplingParams(**fields, repeat_penalty=1.5), [331, 335]) as sampler:
        found = [sampler.sample(logits) for _ in range(40)]
        sampler.reset()
        frozen = logits.copy()
        frozen.flags.writeable = False
        assert [sampler.sample(frozen) for _ in range(40)] == found
    assert min(found) >= 330
    assert np.array_equal(logits, before)


def test_a_clone_and_a_reset(lib: Library) -> None:
    """Draw the same as the first, XTC's own random numbers too."""
    params = SamplingParams(**{**OFF, "min_p": 0.1, "xtc_probability": 0.5}, seed=3)
    logits = steep(2)
    row = LogitRow(WIDE)
    alone(row.read(logits))
    one = RowDraw(lib, params, MersenneTwister(3))
    first = [alone(one.of_row(logits, row)) for _ in range(10)]
    other = one.clone()
    rest = [alone(one.of_row(logits, row)) for _ in range(10)]
    assert [alone(other.of_row(logits, row)) for _ in range(10)] == rest
    one.reset()
    assert [alone(one.of_row(logits, row)) for _ in range(20)] == first + rest
    one.close()
    other.close()


def test_who_draws(bpe: Vocab) -> None:
    """libllama with top-k and with mirostat, the row's own draw else."""
    cases: list[tuple[dict[str, Any], type]] = [
        ({}, draw.ChainDraw),
        ({"mirostat": 2, "top_k": 0}, draw.ChainDraw),
        ({"top_k": 0}, RowDraw),
        ({"top_k": -1}, RowDraw),
    ]
    for params, kind in cases:
        one = draw.make(bpe, SamplingParams(**params), 1)
        assert isinstance(one, kind)
        one.close()


def test_a_bias_beyond_all_numbers(lib: Library) -> None:
    """The token that overflows is the best."""
    logits = flat(1)[:100]
    logits[50] = np.inf
    assert set(drawn(lib, logits, 5, **OFF)) == {50}
