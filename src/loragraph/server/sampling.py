"""Fields of a request that say how tokens are chosen, and the engine's SamplingParams of them.

OpenAI's, vLLM's and llama-server's names; the defaults are llama-server's. What the engine cannot
do is refused unless it asks for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from loragraph.engine.params import SamplingParams
from loragraph.errors import InvalidRequestError
from loragraph.server.state import ServerState

_KNOWN = frozenset(field.name for field in dataclass_fields(SamplingParams))

_MAX_BIAS_CHARS = 1000
_MAX_BAD_WORDS = 1000
_TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")

# What llama-server's clients send along without meaning it: the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "grammar_lazy": (False,),
    "use_beam_search": (False,),
    "reasoning_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "image_data": ([],),
    "multimodal_data": ([],),
    "control_vector": ([],),
    "control_vectors": ([],),
}
# By a parameter of the engine the fields that give it, its own name first.
_GIVEN_BY: Mapping[str, Sequence[str]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "n_predict"),
    "n": ("n", "n_cmpl"),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
}
_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")
_SAMPLER_LETTERS = "edskypmxt"

Number = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """A body whose fields are all known, and of the types that they say."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingBody(Body):
    """How to choose tokens. null is the same as a missing field."""

    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repeat_penalty: Number | None = None
    repetition_penalty: Number | None = None  # vLLM's word for it
    repeat_last_n: int | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    logit_bias: dict[str, Number | bool] | list[list[Any]] | None = None
    # llama-server's that the engine may lack
    mirostat: int | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    top_n_sigma: Number | None = None
    adaptive_target: Number | None = None
    adaptive_decay: Number | None = None
    min_keep: int | None = None
    post_sampling_probs: bool | None = None
    samplers: list[str] | str | None = None
    # vLLM's
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=_MAX_BAD_WORDS)] | None = None


def sampling_params(
    state: ServerState,
    body: SamplingBody,
    *,
    grammar: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    **more: Any,
) -> SamplingParams:
    """SamplingParams of a request. `defaults` stand in for fields that it lacks; `more` are given.

    Tokenises texts of `logit_bias`, so not on the event loop. InvalidRequestError.
    """
    given = {name: value for name, value in body if value is not None}
    refuse_unsupported(given)
    values: dict[str, Any] = dict(defaults or {})
    values |= {name: given[name] for name in _KNOWN & given.keys()}
    if "repetition_penalty" in given:
        _agree(given, "repetition_penalty", "repeat_penalty")
        values["repeat_penalty"] = given["repetition_penalty"]
    limit = token_limit(given)
    if limit is not None:
        values["max_tokens"] = None if limit < 0 else limit
    seed = values.get("seed")
    if seed is not None:
        values["seed"] = None if seed == -1 else seed % 2**32
    if values.get("repeat_last_n") == -1:
        values["repeat_last_n"] = min(state.engine.config.sequence_limit, 1 << 16)
    if "stop" in values:
        stop = values["stop"]
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    if "dry_sequence_breakers" in values:
        values["dry_sequence_breakers"] = tuple(values["dry_sequence_breakers"])
    if "logit_bias" in values:
        values["logit_bias"] = _biases(state, values["logit_bias"])
    if given.get("bad_words"):
        banned = dict.fromkeys(_banned(state, given["bad_words"]), -math.inf)
        values["logit_bias"] = {**values.get("logit_bias", {}), **banned}
    values.pop("samplers", None)
    return SamplingParams(**(values | ({} if grammar is None else {"grammar": grammar}) | more))


def sent_names(body: SamplingBody, more: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By a parameter of the engine the field that gave it, for fields_as_sent().

    `more`: fields that may give further ones; the first that was sent counts.
    """
    names = {}
    for param, fields in {**_GIVEN_BY, **more}.items():
        sent = [field for field in fields if getattr(body, field, None) is not None]
        if sent:
            names[param] = sent[0]
    return names


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """InvalidRequestError for a field that asks for what the engine cannot do."""
    for name, neutral in _NEUTRAL.items():
        if name in given and name not in _KNOWN and given[name] not in neutral:
            raise InvalidRequestError(
                f"{name}: not supported; expected {neutral[0]!r}, got {given[name]!r:.40}",
                param=name,
            )
    for name in ("stop_token_ids", "min_tokens"):
        if given.get(name) and name not in _KNOWN:
            raise InvalidRequestError(f"{name}: not supported", param=name)
    samplers = given.get("samplers")
    if samplers is None:
        return
    order = tuple(samplers)
    known = _SAMPLER_LETTERS if isinstance(samplers, str) else (*_SAMPLERS, "temperature")
    kept = tuple(name for name in known if name in order)
    if order != kept:
        raise InvalidRequestError(
            "samplers: expected the default order, which cannot be changed here: "
            f"{', '.join(_SAMPLERS)}, temperature",
            param="samplers",
        )
    missing = {"top_k", "top_p", "min_p", "temperature"} - set(order)
    if not isinstance(samplers, str) and missing:
        raise InvalidRequestError(
            f"samplers: leaving out {min(missing)} is not supported; give it its neutral value",
            param="samplers",
        )


def refuse_speculative(fields: Mapping[str, Any]) -> None:
    """InvalidRequestError for a `speculative.*` field that asks for it."""
    for name, value in fields.items():
        if name.startswith("speculative.") and value not in (0, "none", None, False):
            raise InvalidRequestError(
                f"{name:.60}: speculative decoding is not supported", param=name[:60]
            )


def token_limit(given: Mapping[str, Any]) -> int | None:
    """The most tokens to generate; negative: no limit; None: not said."""
    names = [name for name in _TOKEN_LIMITS if given.get(name) is not None]
    for name in names[1:]:
        _agree(given, names[0], name)
    return given[names[0]] if names else None


def _agree(given: Mapping[str, Any], one: str, other: str) -> None:
    if other in given and given[one] != given[other]:
        raise InvalidRequestError(
            f"'{one}' and '{other}' disagree: {given[one]!r} and {given[other]!r}", param=other
        )


def _biases(
    state: ServerState, value: dict[str, float | bool] | list[list[Any]]
) -> dict[int, float]:
    """Token id -> bias, of {"id or text": bias} or llama-server's [[id or text, bias or false]].

    A number that is a text is an id as a key, where JSON knows no numbers, and a text in a pair.
    What is said of a token several times is added up.
    """
    keys_are_ids = isinstance(value, dict)
    pairs = [[key, bias] for key, bias in value.items()] if isinstance(value, dict) else value
    biases: dict[int, float] = {}
    for pair in pairs:
        key, bias = pair if len(pair) == 2 else (None, None)
        if bias is True or not isinstance(bias, int | float) or not abs(bias) < 1e39:
            raise _bad_bias(pair)
        number = -math.inf if bias is False else float(bias)
        if keys_are_ids and isinstance(key, str) and key.isdecimal() and len(key) <= 10:
            key = int(key)
        for token in _bias_tokens(state, key, pair):
            biases[token] = biases.get(token, 0.0) + number
    return biases


def _bias_tokens(state: ServerState, key: Any, pair: Any) -> list[int]:
    """The id, or those of all tokens of a text."""
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if not isinstance(key, str) or len(key) > _MAX_BIAS_CHARS:
        raise _bad_bias(pair)
    vocab = state.engine.model.vocab
    return vocab.tokenize(key, add_special=False, parse_special=False)


def _banned(state: ServerState, words: list[str]) -> list[int]:
    """The tokens of words that must not be generated: each at a text's begin and behind a blank.

    As in vLLM, but for words of several tokens, which are refused.
    """
    tokens: list[int] = []
    for word in words:
        bare = word.lstrip()[:_MAX_BIAS_CHARS]
        forms = [_bias_tokens(state, text, word) for text in (bare, f" {bare}")] if bare else []
        alone = [found[0] for found in forms if len(found) == 1]
        if not forms or len(forms[0]) != 1:
            raise InvalidRequestError(
                f"bad_words: expected words of one token, got {word!r:.80}",
                param="bad_words",
                hint="logit_bias forbids tokens by their ids",
            )
        tokens += alone
    return tokens


def _bad_bias(pair: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"logit_bias: expected token ids with numbers, got {pair!r:.80}", param="logit_bias"
    )
