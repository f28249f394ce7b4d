"""llama-server's shapes of what a generation gives: settings, chunks, the last answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Choice, Event, Result
from loragraph.server import sse
from loragraph.server.mixes import uses_json
from loragraph.server.runs import timings_json
from loragraph.vocab.vocab import Vocab

SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "top_k"),
    *("typ_p", "top_p", "min_p", "xtc", "temperature"),
)
"""The order in which candidates are filtered: llama.cpp's default."""

_ANY_SEED = 2**32 - 1  # llama.cpp's way to say that one is drawn
_LEAST = -3.4028234663852886e38  # the lowest float32: JSON has no -inf


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for, as far as its answers show it."""

    params: SamplingParams
    n_prompt: int
    prompt_text: str
    lora: Sequence[Any] = ()  # the request's own field
    stream: bool = False
    return_tokens: bool = False
    fields: tuple[str, ...] = ()  # response_fields
    sequence_limit: int = 0


def settings_json(
    params: SamplingParams, *, stream: bool = False, lora: Sequence[Any] = ()
) -> dict[str, Any]:
    """`generation_settings`; what this server does not have stands there as switched off."""
    n_predict = -1 if params.max_tokens is None else params.max_tokens
    bias = [{"token": token, "bias": _finite(value)} for token, value in params.logit_bias.items()]
    return {
        "seed": _ANY_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "stop": list(params.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": bias,
        "n_probs": params.logprobs or 0,
        "min_keep": params.min_keep,
        "grammar": params.grammar or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "samplers": list(SAMPLERS),
        "speculative.n_max": 0,
        "speculative.n_min": 0,
        "speculative.p_min": 0.0,
        "timings_per_token": False,
        "post_sampling_probs": params.post_sampling_probs,
        "lora": list(lora),
    }


def final_json(
    asked: Asked, choice: Choice, result: Result, vocab: Vocab, model: str
) -> dict[str, Any]:
    """The whole answer, or the last chunk of a stream, whose text has been sent already."""
    n_predicted = len(choice.tokens) + (choice.stop_token is not None)
    answer: dict[str, Any] = {
        "index": choice.index,
        "content": "" if asked.stream else choice.text,
        "tokens": list(choice.tokens) if asked.return_tokens and not asked.stream else [],
        "id_slot": choice.seat,
        "stop": True,
        "model": model,
        "tokens_predicted": n_predicted,
        "tokens_evaluated": asked.n_prompt,
        "generation_settings": {
            **settings_json(asked.params, stream=asked.stream, lora=asked.lora),
            "seed": choice.seed,
        },
        "prompt": asked.prompt_text,
        "has_new_line": "\n" in choice.text,
        "truncated": is_truncated(asked, choice),
        "stop_type": stop_type(choice),
        "stopping_word": choice.stop_string or "",
        "tokens_cached": asked.n_prompt + max(0, len(choice.tokens) - 1),
        "timings": _timings(result, n_predicted),
        "adapters": uses_json(result.adapters),
    }
    if choice.logprobs and not asked.stream:
        post = asked.params.post_sampling_probs
        answer["completion_probabilities"] = probabilities(choice.logprobs, vocab, post=post)
    return answer if not asked.fields else nested_values(answer, asked.fields)


def chunk_json(
    asked: Asked, event: Event, index: int, vocab: Vocab, n_predicted: int
) -> dict[str, Any]:
    """What one token adds to a stream."""
    chunk: dict[str, Any] = {
        "index": index,
        "content": event.piece,
        "tokens": [] if event.token is None else [event.token],
        "stop": False,
        "id_slot": event.seat,
        "tokens_predicted": n_predicted,
        "tokens_evaluated": asked.n_prompt,
    }
    if event.logprob is not None and event.token is not None:
        one = TokenLogprob(event.token, event.logprob, event.top_logprobs)
        post = asked.params.post_sampling_probs
        chunk["completion_probabilities"] = probabilities([one], vocab, post=post)
    return chunk


class ChunkBytes:
    """chunk_json() of one choice as an event, of which only what a token changes is encoded."""

    def __init__(self, asked: Asked, index: int, vocab: Vocab) -> None:
        self._asked = asked
        self._index = index
        self._vocab = vocab
        self._head = b'data: {"index":%d,"content":' % index
        self._tail = b',"tokens_evaluated":%d}\n\n' % asked.n_prompt

    def of(self, event: Event, n_predicted: int, *, has_token: bool = True) -> bytes:
        """What a token adds; without `has_token` it ends the answer and is not told."""
        token = event.token if has_token else None
        if event.logprob is not None and token is not None:
            return sse.data(chunk_json(self._asked, event, self._index, self._vocab, n_predicted))
        return b'%b%b,"tokens":[%b],"stop":false,"id_slot":%d,"tokens_predicted":%d%b' % (
            self._head,
            sse.encoded(event.piece),
            b"" if token is None else b"%d" % token,
            event.seat,
            n_predicted,
            self._tail,
        )


def _timings(result: Result, n_predicted: int) -> dict[str, Any]:
    """`timings` with the tokens of one choice, the last one included."""
    predicted_ms = 1e3 * result.timings.decode_s
    return timings_json(result) | {
        "predicted_n": n_predicted,
        "predicted_per_token_ms": predicted_ms / n_predicted if n_predicted else 0.0,
        "predicted_per_second": 1e3 * n_predicted / predicted_ms if predicted_ms else 0.0,
    }


def stop_type(choice: Choice) -> str:
    """llama-server's word for why a choice ended."""
    if choice.finish_reason == "length":
        return "limit"
    if choice.finish_reason != "stop":
        return "limit" if choice.finish_reason == "abort" else "none"
    return "eos" if choice.stop_string is None else "word"


def is_truncated(asked: Asked, choice: Choice) -> bool:
    """Whether the end of the context ended it, and not what was asked for."""
    wanted = asked.params.max_tokens
    full = asked.n_prompt + len(choice.tokens) >= asked.sequence_limit
    return choice.finish_reason == "length" and full and wanted != len(choice.tokens)


def probabilities(
    logprobs: Iterable[TokenLogprob], vocab: Vocab, *, post: bool = False
) -> list[dict[str, Any]]:
    """`completion_probabilities`: natural logarithms, of the model's own distribution.

    `post`: probabilities, of what tokens were drawn from, as post_sampling_probs has it.
    """
    top = "top_probs" if post else "top_logprobs"
    return [
        {
            **_token(vocab, one.token, one.logprob, post),
            top: [_token(vocab, token, logprob, post) for token, logprob in one.top],
        }
        for one in logprobs
    ]


def nested_values(answer: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Only these fields; a/b is the field b of a, under the name a/b. Missing ones are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for part in path.split("/"):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            found[path] = value
    return found


def _token(vocab: Vocab, token: int, logprob: float, post: bool) -> dict[str, Any]:
    data = vocab.piece(token)
    known = {"prob": math.exp(logprob)} if post else {"logprob": _finite(logprob)}
    return {
        "id": token,
        "token": data.decode("utf-8", "ignore"),
        "bytes": list(data),
        **known,
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
