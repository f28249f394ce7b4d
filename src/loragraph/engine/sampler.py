"""From logits to a token: bias, penalties, grammar, then libllama's chain in its default order.

What a filter does is libllama's; numpy only decides which candidates it gets to see. A request's
sampler owns its random numbers, so its draws do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.grammar import GrammarMatcher
from loragraph.errors import BackendError, InvalidRequestError
from loragraph.ggml.handles import Handle
from loragraph.ggml.lib import Library
from loragraph.vocab.vocab import Vocab

MAX_BIASES = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_LAST_N = 1 << 16

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_GREEDY_BELOW = 1e-6  # a smaller temperature overflows, and leaves one candidate anyway
_MAX_SINGLY = 200  # above, asking the grammar about all tokens at once is cheaper
_SINGLY_PER_CANDIDATE = 4
_UNDERFLOW = 87.0  # exp(-88) is no normal float32; libllama's entropy would be NaN


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; the defaults are llama-server's. InvalidRequestError on bad values.

    `seed` None draws one. `temperature` 0 or less is greedy: the best candidate after bias,
    penalties and grammar. `logit_bias` maps token ids to what is added; -inf forbids a token.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0 or less: no limit
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the penalties look at; 0: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    grammar: str | None = None  # GBNF, start rule `root`
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # None: until the end of generation or of the context
    ignore_eos: bool = False  # forbid the tokens that end a generation

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, -math.inf, 1e4)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("typical_p", self.typical_p, 0.0, 1.0)
        _check_real("repeat_penalty", self.repeat_penalty, 1e-2, 1e2)
        _check_integer("repeat_last_n", self.repeat_last_n, 0, MAX_LAST_N)
        _check_real("frequency_penalty", self.frequency_penalty, -1e3, 1e3)
        _check_real("presence_penalty", self.presence_penalty, -1e3, 1e3)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**32 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise _bad("grammar", "a text in GBNF", self.grammar)
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", "true or false", self.ignore_eos)
        _check_stop(self.stop)
        _check_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """True where the best candidate is taken without a draw."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """True where the penalties change anything."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class Sampler:
    """One sequence's sampler; close() frees its libllama parts. `vocab` must outlive it.

    `seed` is the one in use, drawn where the parameters have none.
    """

    def __init__(self, vocab: Vocab, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbelow(2**32 - 1) if params.seed is None else params.seed
        self._vocab = vocab
        self._bias_ids, self._bias = _bias_arrays(vocab, params)
        only_forbids = bool(np.all(self._bias == -np.inf))
        self._forbidden = frozenset(self._bias_ids.tolist()) if only_forbids else None
        self._recent: deque[int] = deque(maxlen=params.repeat_last_n)
        # the grammar first: it is what can be refused, and nothing is owned yet
        self._grammar = (
            None if params.grammar is None else GrammarMatcher.parse(vocab, params.grammar)
        )
        self._penalties = _penalties(vocab, params) if params.penalises else None
        self._filters = None if params.greedy else _filters(vocab.lib, params, self.seed)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is just the largest logit's, unless that is `forbidden`."""
        return (
            self.params.greedy
            and self._forbidden is not None
            and self._grammar is None
            and self._penalties is None
        )

    @property
    def forbidden(self) -> frozenset[int] | None:
        """Tokens that logit_bias only forbids; None where it does more."""
        return self._forbidden

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token for `logits` (n_vocab,) f32, which stay unchanged. Does not accept it.

        BackendError for logits that are no finite numbers, InvalidRequestError where bias and
        grammar leave no candidate.
        """
        self._check_logits(logits)
        return self._choose(self._adjust(logits))

    def accept(self, token: int) -> None:
        """Tells penalties and grammar that `token` is the next one of the sequence."""
        if not 0 <= token < self._vocab.n_tokens:
            raise InvalidRequestError(
                f"token id: expected 0 to {self._vocab.n_tokens - 1}, got {token}", param="tokens"
            )
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._penalties is not None:
            self._vocab.lib.c.llama_sampler_accept(self._penalties.ptr, token)
            self._recent.append(token)

    def reset(self) -> None:
        """Back to the state after construction, the random numbers too."""
        self._recent.clear()
        for owner in (self._penalties, self._filters):
            if owner is not None:
                self._vocab.lib.c.llama_sampler_reset(owner.ptr)
        if self._grammar is not None:
            self._grammar.reset()

    def clone(self) -> Sampler:
        """An independent sampler in the same state: both will draw the same."""
        other = object.__new__(Sampler)
        other.params, other.seed, other._vocab = self.params, self.seed, self._vocab
        other._bias_ids, other._bias = self._bias_ids, self._bias
        other._forbidden = self._forbidden
        other._recent = self._recent.copy()
        other._grammar = self._grammar.clone() if self._grammar is not None else None
        other._penalties = self._penalties.clone() if self._penalties is not None else None
        other._filters = self._filters.clone() if self._filters is not None else None
        return other

    def close(self) -> None:
        """Frees libllama's samplers; a second call does nothing."""
        for owner in (self._penalties, self._filters):
            if owner is not None:
                owner.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _check_logits(self, logits: NDArray[np.float32]) -> None:
        if logits.dtype != np.float32 or logits.shape != (self._vocab.n_tokens,):
            raise BackendError(
                f"logits: expected ({self._vocab.n_tokens},) float32, "
                f"got {logits.shape} {logits.dtype}"
            )
        if not np.isfinite(logits).all():
            raise BackendError("the model's logits are not finite numbers")

    def _adjust(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (n_vocab,) with bias and penalties; a copy where there are any."""
        if not len(self._bias_ids) and not self._recent:
            return logits
        adjusted = logits.copy()
        adjusted[self._bias_ids] += self._bias
        if self._penalties is not None and self._recent:
            ids = np.unique(np.fromiter(self._recent, np.int64, len(self._recent)))
            candidates = _Candidates(self._vocab.lib, ids, adjusted)
            self._vocab.lib.c.llama_sampler_apply(self._penalties.ptr, candidates.ptr)
            adjusted[ids] = candidates.data["logit"]
        return adjusted

    def _choose(self, logits: NDArray[np.float32]) -> int:
        if self.params.greedy:
            if self._grammar is None:
                return self._checked(int(np.argmax(logits)), logits)
            return int(self._allowed(logits, 1).data["id"][0])
        candidates = self._allowed(logits, self.params.top_k)
        self._vocab.lib.c.llama_sampler_apply(_ptr(self._filters), candidates.ptr)
        return candidates.selected

    def _checked(self, token: int, logits: NDArray[np.float32]) -> int:
        if logits[token] == -np.inf:
            raise _nothing_left()
        return token

    def _allowed(self, logits: NDArray[np.float32], k: int) -> _Candidates:
        """The best `k` candidates (all of them for k <= 0) that the grammar allows."""
        ids = self._allowed_ids(logits, k)
        candidates = _Candidates(self._vocab.lib, ids, logits, ranked=k > 0)
        candidates.drop_forbidden(_UNDERFLOW if self.params.typical_p < 1 else math.inf)
        if not len(candidates.data):
            raise _nothing_left()
        return candidates

    def _allowed_ids(self, logits: NDArray[np.float32], k: int) -> NDArray[np.intp]:
        """Their ids, the best first for k > 0.

        Exact: the grammar is asked about the top of the ranking one by one, and about all tokens at
        once where too few of the top passed.
        """
        if self._grammar is None:
            return _ranked(logits, k) if k > 0 else np.arange(len(logits))
        if 0 < k <= _MAX_SINGLY:
            top = _ranked(logits, k * _SINGLY_PER_CANDIDATE)
            passed = list(islice(filter(self._grammar.allows, top.tolist()), k))
            if len(passed) == k:
                return np.array(passed, np.intp)
        allowed = self._grammar.allowed_tokens().astype(np.intp)
        return allowed[_ranked(logits[allowed], k)] if k > 0 else allowed


class _Candidates:
    """A `llama_token_data_array` over numpy memory, (n,) of (id, logit, p)."""

    def __init__(
        self,
        lib: Library,
        ids: NDArray[np.intp],
        logits: NDArray[np.float32],
        *,
        ranked: bool = False,
    ) -> None:
        self._lib = lib
        self._ranked = ranked  # the best first
        self.data: NDArray[Any] = np.empty(len(ids), _CANDIDATE)
        self.data["id"] = ids
        self.data["logit"] = logits[ids] if ranked or len(ids) != len(logits) else logits
        self._wrap()

    @property
    def selected(self) -> int:
        """The token that the last sampler of a chain chose."""
        index = int(self.ptr.selected)
        if not 0 <= index < int(self.ptr.size):
            raise BackendError("libllama's sampler chain chose no candidate")
        return int(self.data["id"][index])

    def drop_forbidden(self, window: float) -> None:
        """Leaves out logits of -inf, and those more than `window` below the best."""
        logit = self.data["logit"]
        keep = logit > (logit.max(initial=-np.inf) - window if window < math.inf else -np.inf)
        if not keep.all():
            self.data = self.data[keep]
            self._wrap()

    def _wrap(self) -> None:
        ffi = self._lib.ffi
        self._memory = ffi.from_buffer(self.data) if len(self.data) else ffi.NULL
        data = ffi.cast("llama_token_data *", self._memory)
        self.ptr = ffi.new("llama_token_data_array *", [data, len(self.data), -1, self._ranked])


class _Chain(Handle):
    """Owner of a libllama sampler."""

    def clone(self) -> _Chain:
        """A copy in the same state."""
        return _Chain(self.lib, self.lib.c.llama_sampler_clone(self.ptr), "sampler")

    def _free(self, ptr: Any) -> None:
        self.lib.c.llama_sampler_free(ptr)


def _ptr(owner: _Chain | None) -> Any:
    assert owner is not None  # greedy never gets here
    return owner.ptr


def _ranked(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ids of the `n` largest logits, best first, the lower id first among equals."""
    size = len(logits)
    if n < size:
        smallest = np.partition(logits, size - n)[size - n]
        ids = np.flatnonzero(logits >= smallest)  # with all that equal the last one
    else:
        ids = np.arange(size)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][:n]


def _penalties(vocab: Vocab, params: SamplingParams) -> _Chain:
    ptr = vocab.lib.c.llama_sampler_init_penalties(
        vocab.n_tokens,
        params.repeat_last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    return _Chain(vocab.lib, ptr, "sampler")


def _filters(lib: Library, params: SamplingParams, seed: int) -> _Chain:
    """typical, top-p, min-p, temperature, draw: llama.cpp's default order after top-k."""
    c = lib.c
    chain = _Chain(
        lib, c.llama_sampler_chain_init(c.llama_sampler_chain_default_params()), "sampler"
    )
    parts: list[tuple[bool, Callable[[], Any]]] = [
        (params.typical_p < 1, lambda: c.llama_sampler_init_typical(params.typical_p, 0)),
        (params.top_p < 1, lambda: c.llama_sampler_init_top_p(params.top_p, 0)),
        (params.min_p > 0, lambda: c.llama_sampler_init_min_p(params.min_p, 0)),
        (True, lambda: c.llama_sampler_init_temp(params.temperature)),
        (True, lambda: c.llama_sampler_init_dist(seed)),
    ]
    for wanted, make in parts:
        if wanted:
            c.llama_sampler_chain_add(chain.ptr, make())
    return chain


def _bias_arrays(
    vocab: Vocab, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    bias = {int(token): float(value) for token, value in params.logit_bias.items()}
    for token in bias:
        if not 0 <= token < vocab.n_tokens:
            raise _bad("logit_bias", f"token ids from 0 to {vocab.n_tokens - 1}", token)
    if params.ignore_eos:
        bias |= dict.fromkeys(vocab.eog_tokens, -math.inf)
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def _bad(name: str, expected: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: expected {expected}, got {got!r:.80}", param=name)


def _nothing_left() -> InvalidRequestError:
    return InvalidRequestError("grammar and logit_bias leave no token to choose", param="grammar")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not (good and math.isfinite(value) and low <= value <= high):  # type: ignore[arg-type,operator]
        bounds = f"from {low:g} to {high:g}" if math.isfinite(low) else f"up to {high:g}"
        raise _bad(name, f"a number {bounds}", value)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"an integer from {low} to {high}", value)


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise _bad("stop", "a tuple of strings", stop)
    if len(stop) > MAX_STOP_STRINGS:
        raise _bad("stop", f"at most {MAX_STOP_STRINGS} strings", len(stop))
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_BYTES:
            raise _bad("stop", f"strings of 1 to {MAX_STOP_BYTES} characters", text)


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
        raise _bad("logit_bias", f"a mapping of at most {MAX_BIASES} token ids to numbers", bias)
    for token, value in bias.items():
        _check_integer("logit_bias", token, 0, 2**31 - 1)
        if value != -math.inf:
            _check_real("logit_bias", value, -1e4, 1e4)
