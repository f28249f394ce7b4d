"""libllama's samplers, made from a request's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loragraph.engine.params import SamplingParams
from loragraph.ggml.handles import Handle
from loragraph.ggml.lib import Library
from loragraph.kernels.sampling import Passes, other
from loragraph.vocab.vocab import Vocab

_MIROSTAT_M = 100  # candidates of mirostat's estimate: llama.cpp's (common/sampling.cpp)


class Chain(Handle):
    """Owner of a libllama sampler."""

    def clone(self) -> Chain:
        """A copy in the same state."""
        return Chain(self.lib, self.lib.c.llama_sampler_clone(self.ptr), "sampler")

    def apply(self, candidates: Any) -> None:
        """Filters a `llama_token_data_array`, and chooses if the chain ends in a draw."""
        self.lib.c.llama_sampler_apply(self.ptr, candidates)

    def applied(self, candidates: Any) -> Passes[None]:
        """`apply` as a call, to be run beside those of other sequences."""
        function = self.lib.ffi.addressof(self.lib.c, "llama_sampler_apply")
        yield from other(*map(self.lib.address, (function, self.ptr, candidates)))

    def reset(self) -> None:
        """Back to the state after construction."""
        self.lib.c.llama_sampler_reset(self.ptr)

    def _free(self, ptr: Any) -> None:
        self.lib.c.llama_sampler_free(ptr)


def penalties(vocab: Vocab, params: SamplingParams, last_n: int) -> Chain:
    """Repetition, frequency and presence, over the last `last_n` tokens."""
    ptr = vocab.lib.c.llama_sampler_init_penalties(
        vocab.n_tokens,
        last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    return Chain(vocab.lib, ptr, "sampler")


def dry(vocab: Vocab, params: SamplingParams, last_n: int) -> Chain:
    """Don't Repeat Yourself, over the last `last_n` tokens.

    libllama looks through the whole vocabulary once for each sequence breaker.
    """
    ffi = vocab.lib.ffi
    texts = [
        ffi.new("char[]", text.encode()) for text in dict.fromkeys(params.dry_sequence_breakers)
    ]
    breakers = ffi.new("const char *[]", texts or 1)
    ptr = vocab.lib.c.llama_sampler_init_dry(
        vocab.vocab_ptr,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        last_n,
        breakers,
        len(texts),
    )
    return Chain(vocab.lib, ptr, "sampler")


def top_n_sigma(lib: Library, params: SamplingParams) -> Chain:
    """Masks what lies more than n standard deviations below the best logit."""
    return Chain(lib, lib.c.llama_sampler_init_top_n_sigma(params.top_n_sigma), "sampler")


def filters(vocab: Vocab, params: SamplingParams, seed: int) -> Chain:
    """llama.cpp's default order after top-k: typical, top-p, min-p, XTC, temperature, draw.

    With mirostat: temperature, then mirostat, which draws.
    """
    c = vocab.lib.c
    if params.mirostat:
        return _chain(vocab.lib, _mirostat(vocab, params, seed))
    draw: _Parts = [(True, lambda: c.llama_sampler_init_dist(seed))]
    return _chain(vocab.lib, _cuts(vocab.lib, params) + _changes(vocab.lib, params, seed) + draw)


def cuts(lib: Library, params: SamplingParams) -> Chain:
    """The first of `filters`: typical, top-p."""
    return _chain(lib, _cuts(lib, params))


def changes(lib: Library, params: SamplingParams, seed: int) -> Chain:
    """Those between `cuts` and the draw: min-p, XTC, temperature."""
    return _chain(lib, _changes(lib, params, seed))


def has_xtc(params: SamplingParams) -> bool:
    """Whether XTC changes anything."""
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5


_Parts = list[tuple[bool, Callable[[], Any]]]


def _chain(lib: Library, parts: _Parts) -> Chain:
    c = lib.c
    chain = Chain(
        lib, c.llama_sampler_chain_init(c.llama_sampler_chain_default_params()), "sampler"
    )
    for wanted, make in parts:
        if wanted:
            c.llama_sampler_chain_add(chain.ptr, make())
    return chain


def _cuts(lib: Library, params: SamplingParams) -> _Parts:
    c, n = lib.c, params.min_keep
    return [
        (params.typical_p < 1, lambda: c.llama_sampler_init_typical(params.typical_p, n)),
        (params.top_p < 1, lambda: c.llama_sampler_init_top_p(params.top_p, n)),
    ]


def _changes(lib: Library, params: SamplingParams, seed: int) -> _Parts:
    c, n = lib.c, params.min_keep
    probability, threshold = params.xtc_probability, params.xtc_threshold
    temperature, delta = params.temperature, params.dynatemp_range
    return [
        (params.min_p > 0, lambda: c.llama_sampler_init_min_p(params.min_p, n)),
        (
            has_xtc(params),
            lambda: c.llama_sampler_init_xtc(probability, threshold, n, seed),
        ),
        (
            True,
            lambda: c.llama_sampler_init_temp_ext(temperature, delta, params.dynatemp_exponent),
        ),
    ]


def _mirostat(vocab: Vocab, params: SamplingParams, seed: int) -> _Parts:
    c, tau, eta = vocab.lib.c, params.mirostat_tau, params.mirostat_eta
    first = params.mirostat == 1
    n_tokens = vocab.n_tokens
    return [
        (True, lambda: c.llama_sampler_init_temp(params.temperature)),
        (first, lambda: c.llama_sampler_init_mirostat(n_tokens, seed, tau, eta, _MIROSTAT_M)),
        (not first, lambda: c.llama_sampler_init_mirostat_v2(seed, tau, eta)),
    ]
