"""How to choose tokens: a request's sampling parameters, and what is wrong with them. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loragraph.errors import InvalidRequestError

MAX_BIASES = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_STOP_TOKENS = 1024
MAX_LAST_N = 1 << 16
MAX_LOGPROBS = 128
"""Most likely tokens whose log-probabilities can be asked for, at each place."""

MAX_BREAKERS = 16
MAX_BREAKER_BYTES = 40
"""Bytes of a sequence breaker in UTF-8: libllama cuts longer ones (MAX_CHAR_LEN)."""

MAX_BREAKER_TOKENS = 1 << 14
"""Tokens that the sequence breakers may occur in, or begin in: each takes memory in libllama."""

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default (common.h)."""

_FLAGS = "ignore_eos", "post_sampling_probs", "include_stop_str_in_output", "skip_special_tokens"
_HUGE = 1e39  # more than any float32
_GREEDY_BELOW = 1e-6  # a smaller temperature overflows, and leaves one candidate anyway


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; the defaults are llama-server's. InvalidRequestError on bad values.

    `seed` None draws one. `temperature` 0 or less is greedy: the best candidate after bias,
    penalties and grammar. `logit_bias` maps token ids to what is added; -inf forbids a token.
    `logprobs` k asks for the log-probability of each token and of the k most likely ones, of the
    model's own distribution: bias, penalties and temperature do not change them. With
    `post_sampling_probs` they are of the distribution that the token was drawn from, after all
    filters and the temperature: fewer than k where fewer were left; greedy leaves one.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0 or less: no limit
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    min_keep: int = 0  # candidates that top-p, min-p, typical and XTC leave at least
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the penalties look at, the prompt's too; -1: all; 0: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    grammar: str | None = None  # GBNF, start rule `root`
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False  # what ended the text stands at its end
    skip_special_tokens: bool = True  # control tokens are not in the text
    max_tokens: int | None = None  # None: until the end of generation or of the context
    ignore_eos: bool = False  # forbid the tokens that end a generation
    logprobs: int | None = None
    post_sampling_probs: bool = False
    stop_token_ids: tuple[int, ...] = ()  # end the generation as its own end does; not in the text
    min_tokens: int = 0  # before that many nothing ends it: no token, no stop string
    top_n_sigma: float = -1.0  # 0 or less: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    dynatemp_range: float = 0.0  # 0: off; the temperature lies within it of `temperature`
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 1 or 2: that version, in place of all filters
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75  # below 1: off
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # -1: all tokens; 0: off
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, -math.inf, 1e4)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("typical_p", self.typical_p, 0.0, 1.0)
        _check_integer("min_keep", self.min_keep, 0, 2**31 - 1)
        _check_real("repeat_penalty", self.repeat_penalty, 1e-2, 1e2)
        _check_integer("repeat_last_n", self.repeat_last_n, -1, MAX_LAST_N)
        _check_real("frequency_penalty", self.frequency_penalty, -1e3, 1e3)
        _check_real("presence_penalty", self.presence_penalty, -1e3, 1e3)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**32 - 1)
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise bad_param("grammar", "a text in GBNF", self.grammar)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise bad_param(name, "true or false", getattr(self, name))
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_bias(self.logit_bias)
        self._check_end()
        self._check_llama_filters()
        self._check_dry()

    @property
    def greedy(self) -> bool:
        """True where the best candidate is taken without a draw."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """True where the penalties change anything."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def dry(self) -> bool:
        """True where DRY changes anything."""
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    def _check_end(self) -> None:
        """What ends a generation."""
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad_param("min_tokens", f"at most max_tokens {self.max_tokens}", self.min_tokens)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES)
        ids = self.stop_token_ids
        if not isinstance(ids, tuple) or len(ids) > MAX_STOP_TOKENS:
            raise bad_param(
                "stop_token_ids", f"a tuple of at most {MAX_STOP_TOKENS} token ids", ids
            )
        for token in ids:
            _check_integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_llama_filters(self) -> None:
        _check_real("top_n_sigma", self.top_n_sigma, -1e4, 1e4)
        _check_real("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _check_real("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _check_real("dynatemp_range", self.dynatemp_range, 0.0, 1e4)
        _check_real("dynatemp_exponent", self.dynatemp_exponent, 0.0, 1e2)
        _check_integer("mirostat", self.mirostat, 0, 2)
        _check_real("mirostat_tau", self.mirostat_tau, 0.0, 1e2)
        _check_real("mirostat_eta", self.mirostat_eta, 0.0, 1e2)

    def _check_dry(self) -> None:
        _check_real("dry_multiplier", self.dry_multiplier, 0.0, 1e2)
        _check_real("dry_base", self.dry_base, 0.0, 1e2)
        _check_integer("dry_allowed_length", self.dry_allowed_length, 0, MAX_LAST_N)
        _check_integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, MAX_LAST_N)
        name = "dry_sequence_breakers"
        _check_strings(name, self.dry_sequence_breakers, MAX_BREAKERS, MAX_BREAKER_BYTES)
        for text in self.dry_sequence_breakers:
            try:
                good = len(text.encode()) <= MAX_BREAKER_BYTES and "\0" not in text
            except UnicodeEncodeError:
                good = False
            if not good:
                raise bad_param(name, f"at most {MAX_BREAKER_BYTES} bytes of UTF-8, no NUL", text)


def bad_param(name: str, expected: str, got: object) -> InvalidRequestError:
    """The error for a parameter's value."""
    return InvalidRequestError(f"{name}: expected {expected}, got {got!r:.80}", param=name)


def _check_real(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # an integer may be too large for a float, so its size is asked first
    if not (good and low <= value <= high and abs(value) < _HUGE):  # type: ignore[arg-type,operator]
        bounds = f"from {low:g} to {high:g}" if math.isfinite(low) else f"up to {high:g}"
        raise bad_param(name, f"a number {bounds}", value)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad_param(name, f"an integer from {low} to {high}", value)


def _check_strings(name: str, value: object, n_most: int, length: int) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise bad_param(name, "a tuple of strings", value)
    if len(value) > n_most:
        raise bad_param(name, f"at most {n_most} strings", len(value))
    for text in value:
        if not 0 < len(text) <= length:
            raise bad_param(name, f"strings of 1 to {length} characters", text)


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
        raise bad_param(
            "logit_bias", f"a mapping of at most {MAX_BIASES} token ids to numbers", bias
        )
    for token, value in bias.items():
        _check_integer("logit_bias", token, 0, 2**31 - 1)
        if value != -math.inf:
            _check_real("logit_bias", value, -1e4, 1e4)
