"""The sampler beside libllama's whole chain in llama.cpp's order, draw by draw."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragraph.engine.params import SamplingParams
from loragraph.engine.sampler import Sampler
from loragraph.errors import InvalidRequestError
from loragraph.ggml.lib import Library
from loragraph.vocab.vocab import Vocab
from tests.gguf_bytes import write_gguf
from tests.oracle.libllama import Libllama, low
from tests.tiny_vocab import bpe_metadata

N_TOKENS = 340
PROMPT = [60, 61, 62, 63, 60, 61, 62]
Logits = npt.NDArray[np.float32]


class Chain:
    """llama.cpp's common/sampling.cpp: bias apart, over all candidates."""

    def __init__(self, vocab: Any, params: SamplingParams, seed: int) -> None:
        self.chain = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
        for one in _mirostat(params, seed) if params.mirostat else _default(vocab, params, seed):
            low.llama_sampler_chain_add(self.chain, one)

    def accept(self, token: int) -> None:
        """The next token of the sequence."""
        low.llama_sampler_accept(self.chain, token)

    def sample(self, logits: Logits) -> int:
        """The token that the chain chooses."""
        data = (low.llama_token_data * len(logits))(
            *((token, float(logit), 0.0) for token, logit in enumerate(logits))
        )
        array = low.llama_token_data_array(data, len(logits), -1, False)
        low.llama_sampler_apply(self.chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        """Frees it."""
        low.llama_sampler_free(self.chain)


def _default(vocab: Any, p: SamplingParams, seed: int) -> list[Any]:
    texts = [text.encode() for text in p.dry_sequence_breakers]
    breakers = (ctypes.c_char_p * len(texts))(*texts)
    last_n = 4096 if p.dry_penalty_last_n < 0 else p.dry_penalty_last_n
    return [
        low.llama_sampler_init_penalties(
            N_TOKENS,
            p.repeat_last_n,
            p.repeat_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        ),
        low.llama_sampler_init_dry(
            vocab,
            p.dry_multiplier,
            p.dry_base,
            p.dry_allowed_length,
            last_n,
            breakers,
            len(texts),
        ),
        low.llama_sampler_init_top_n_sigma(p.top_n_sigma),
        low.llama_sampler_init_top_k(p.top_k),
        low.llama_sampler_init_typical(p.typical_p, 0),
        low.llama_sampler_init_top_p(p.top_p, 0),
        low.llama_sampler_init_min_p(p.min_p, 0),
        low.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, 0, seed),
        low.llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent),
        low.llama_sampler_init_dist(seed),
    ]


def _mirostat(p: SamplingParams, seed: int) -> list[Any]:
    temp = low.llama_sampler_init_temp(p.temperature)
    if p.mirostat == 1:
        args = (N_TOKENS, seed, p.mirostat_tau, p.mirostat_eta, 100)
        return [temp, low.llama_sampler_init_mirostat(*args)]
    return [temp, low.llama_sampler_init_mirostat_v2(seed, p.mirostat_tau, p.mirostat_eta)]


class Both:
    """One vocabulary, for ours and for the oracle."""

    def __init__(self, lib: Library, path: Path) -> None:
        self.vocab = Vocab.load(lib, path)
        self.oracle = Libllama(path, vocab_only=True)

    def draws(self, params: SamplingParams, logits: npt.NDArray[np.float32]) -> list[list[int]]:
        """Tokens of ours and of the oracle, a row of `logits` (n, n_tokens) f32 each."""
        assert params.seed is not None
        found: list[list[int]] = [[], []]
        theirs = Chain(self.oracle._vocab, params, params.seed)
        for token in PROMPT:
            theirs.accept(token)
        with Sampler(self.vocab, params, PROMPT) as ours:
            for row in logits:
                found[0].append(ours.sample(row))
                found[1].append(theirs.sample(row))
                ours.accept(found[0][-1])
                theirs.accept(found[1][-1])
        theirs.close()
        return found


@pytest.fixture(scope="module")
def both(lib: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The vocabulary, loaded twice."""
    path = tmp_path_factory.mktemp("chain") / "vocab.gguf"
    write_gguf(path, {"general.architecture": "llama", **bpe_metadata(N_TOKENS)}, [])
    both = Both(lib, path)
    yield both
    both.oracle.close()
    both.vocab.close()


def rows(n: int, seed: int = 1) -> npt.NDArray[np.float32]:
    """Logits (n, n_tokens) in which a few tokens lead, so that texts repeat themselves."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((n, N_TOKENS)) * 2
    logits[:, 58:70] += 6
    return logits.astype(np.float32)


OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
NO_BREAKERS: dict[str, Any] = {"dry_sequence_breakers": ()}


@pytest.mark.parametrize(
    "params",
    [
        {},
        OFF,
        {"repeat_penalty": 1.3, "repeat_last_n": 8},
        {"frequency_penalty": 0.5, "presence_penalty": 0.7, "repeat_penalty": 0.9},
        {**OFF, "top_n_sigma": 1.0},
        {"top_n_sigma": 2.0, "top_k": 3, "temperature": 1.5},
        {"top_n_sigma": 0.5, "top_p": 0.7},
        {**OFF, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"xtc_probability": 0.5, "xtc_threshold": 0.6},
        {**OFF, "dynatemp_range": 0.8, "dynatemp_exponent": 1.5},
        {"dynatemp_range": 1.5, "temperature": 1.0},
        {**OFF, "dry_multiplier": 0.8},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 3.0, **NO_BREAKERS},
        {"dry_multiplier": 5.0, "dry_penalty_last_n": 6, "dry_allowed_length": 0, **NO_BREAKERS},
        {"dry_multiplier": 5.0, "dry_base": 0.5},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ("<", "ab", "é"), "repeat_penalty": 1.1},
        {"mirostat": 1},
        {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.5, "temperature": 1.3},
        {"mirostat": 2},
        {"mirostat": 2, "mirostat_tau": 0.0, "top_k": 3, "repeat_penalty": 2.0},
        {"typical_p": 0.6, "top_p": 0.8, "min_p": 0.1, "xtc_probability": 0.3},
    ],
    ids=str,
)
def test_draws_are_the_chains(both: Both, params: dict[str, Any]) -> None:
    """The same tokens for 150 steps, each of which sees what was drawn before.

    Not with top-n-sigma before typical: libllama leaves masked candidates in, whose entropy is NaN.
    """
    ours, theirs = both.draws(SamplingParams(**params, seed=11), rows(150))
    assert ours == theirs


@pytest.mark.parametrize(
    "params",
    [
        {"top_n_sigma": 0.7},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"dynatemp_range": 0.9},
        {"dry_multiplier": 5.0, "dry_allowed_length": 0, **NO_BREAKERS},
        {"mirostat": 1},
        {"mirostat": 2},
    ],
    ids=str,
)
def test_each_changes_the_draws(both: Both, params: dict[str, Any]) -> None:
    """No option is without effect, so that the comparison with the chain tells something."""
    with_it, _ = both.draws(SamplingParams(**OFF, seed=11), rows(60))
    without, _ = both.draws(SamplingParams(**{**OFF, **params}, seed=11), rows(60))
    assert with_it != without


_REAL = st.floats(0, 1, width=32)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1e-5, 0.7, 1.0, 30.0, 1e4]),
            "top_k": st.sampled_from([0, 1, 2, 40, 10_000]),
            "top_p": st.sampled_from([1.0, 0.9, 0.0]),
            "min_p": st.sampled_from([0.0, 0.05, 1.0]),
            "typical_p": st.sampled_from([1.0, 0.5, 0.0]),
            "top_n_sigma": st.sampled_from([-1.0, 1e-6, 1.0, 1e4]),
            "xtc_probability": _REAL,
            "xtc_threshold": _REAL,
            "dynatemp_range": st.sampled_from([0.0, 0.5, 1e4]),
            "dynatemp_exponent": st.sampled_from([0.0, 1.0, 100.0]),
            "mirostat": st.integers(0, 2),
            "mirostat_tau": st.sampled_from([0.0, 5.0, 100.0]),
            "mirostat_eta": st.sampled_from([0.0, 0.1, 100.0]),
            "dry_multiplier": st.sampled_from([0.0, 1.0, 100.0]),
            "dry_base": st.sampled_from([0.0, 1.0, 1.75, 100.0]),
            "dry_allowed_length": st.sampled_from([0, 2, 1 << 16]),
            "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 5, 1 << 16]),
            "dry_sequence_breakers": st.sampled_from([(), ("\n",), ("é" * 20,), ("a", "aa")]),
            "repeat_last_n": st.sampled_from([-1, 0, 1, 64]),
            "repeat_penalty": st.sampled_from([1.0, 0.01, 100.0]),
            "min_tokens": st.sampled_from([0, 3]),
        }
    ),
    size=st.sampled_from([1e-3, 1.0, 1e3, 1e30]),
    grammar=st.sampled_from([None, "root ::= [a-z]*"]),
)
def test_no_combination_harms(
    both: Both, params: dict[str, Any], size: float, grammar: str | None
) -> None:
    """Every allowed value gives a token of the vocabulary, for flat logits and for steep ones."""
    with Sampler(both.vocab, SamplingParams(**params, seed=1, grammar=grammar), PROMPT) as sampler:
        for row in rows(6, seed=2) * np.float32(size):
            token = sampler.sample(row)
            assert 0 <= token < N_TOKENS
            sampler.accept(token)
            if both.vocab.is_eog(token):
                break


def test_a_clone_and_a_reset_draw_the_same(both: Both) -> None:
    """With every state there is: windows, random numbers, mirostat's estimate, the prompt."""
    logits = rows(40)
    for mirostat in (0, 1, 2):
        params = SamplingParams(
            seed=3, dry_multiplier=1.0, repeat_penalty=1.2, xtc_probability=0.5, mirostat=mirostat
        )

        def drawn(sampler: Sampler, some: Logits) -> list[int]:
            found = []
            for row in some:
                found.append(sampler.sample(row))
                sampler.accept(found[-1])
            return found

        with Sampler(both.vocab, params, PROMPT) as sampler:
            first = drawn(sampler, logits[:20])
            with sampler.clone() as clone:
                rest = drawn(sampler, logits[20:])
                assert drawn(clone, logits[20:]) == rest
            sampler.reset()
            assert drawn(sampler, logits) == first + rest


def test_the_grammar_comes_before_sigma(both: Both) -> None:
    """Only allowed tokens count for the deviation, and only they are drawn."""
    allowed = [both.vocab.tokenize(letter)[0] for letter in "aeiou"]
    logits = rows(1)[0]
    logits[allowed] = (0.0, 1.0, 2.0, 3.0, 30.0)
    params = SamplingParams(**{**OFF, "top_n_sigma": 1.0}, seed=1, grammar="root ::= [aeiou]")
    with Sampler(both.vocab, params) as sampler:
        assert {sampler.sample(logits) for _ in range(50)} == {allowed[-1]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_n_sigma", math.nan),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dynatemp_range", -1.0),
        ("dynatemp_exponent", math.inf),
        ("mirostat", 3),
        ("mirostat", True),
        ("mirostat_tau", -1),
        ("mirostat_eta", "1"),
        ("dry_multiplier", -1.0),
        ("dry_base", 1e9),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_penalty_last_n", 1 << 20),
        ("dry_sequence_breakers", ["a"]),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("a\0b",)),
        ("dry_sequence_breakers", ("é" * 21,)),
        ("dry_sequence_breakers", ("\ud800",)),
        ("dry_sequence_breakers", ("a",) * 65),
    ],
)
def test_wrong_values(name: str, value: Any) -> None:
    """Are refused by name before libllama sees them."""
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_another_seed_is_a_new_sampler(both: Both) -> None:
    """The same draws as one that was made with that seed, whatever the options."""
    logits = rows(30)
    for options in ({}, {"mirostat": 2}, {"xtc_probability": 0.5, "dry_multiplier": 1.0}):
        params: dict[str, Any] = {**options, "repeat_penalty": 1.2, "temperature": 2.0}
        params["grammar"] = "root ::= [^\\x00]*"
        with (
            Sampler(both.vocab, SamplingParams(**params, seed=1), PROMPT) as first,
            first.with_seed(2) as second,
            Sampler(both.vocab, SamplingParams(**params, seed=2), PROMPT) as expected,
        ):
            assert second.seed == second.params.seed == 2
            for row in logits:
                token = expected.sample(row)
                assert second.sample(row) == token
                expected.accept(token)
                second.accept(token)


def test_breakers_that_are_everywhere(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that occur in, or begin at the end of, too many tokens are refused."""
    monkeypatch.setattr("loragraph.engine.repetition.MAX_BREAKER_TOKENS", 4)
    for breakers, harm in ((("a",), True), (("abcdef",), True), (("<|im_end|>", "#"), False)):
        params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=breakers)
        if harm:
            with pytest.raises(InvalidRequestError, match="at most 4 tokens"):
                Sampler(both.vocab, params)
        else:
            Sampler(both.vocab, params).close()


def test_windows_end_with_the_context(both: Both) -> None:
    """More tokens than a sequence can have are as good as all."""
    logits = rows(40)
    found = []
    for last_n in (-1, 60, 1 << 16):
        params = SamplingParams(
            seed=1,
            dry_multiplier=3.0,
            dry_penalty_last_n=last_n,
            repeat_last_n=last_n,
            repeat_penalty=1.1,
        )
        with Sampler(both.vocab, params, PROMPT, n_ctx=60) as sampler:
            tokens = []
            for row in logits:
                tokens.append(sampler.sample(row))
                sampler.accept(tokens[-1])
        found.append(tokens)
    assert found[0] == found[1] == found[2]
