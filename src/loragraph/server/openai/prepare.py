"""What chat and plain completions share on their way to the engine."""

from __future__ import annotations

import secrets
import time
from typing import Any

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import InvalidRequestError
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.openai.fields import GenerationBody
from loragraph.server.routing import own_version
from loragraph.server.runs import Run
from loragraph.server.state import ServerState

_FINGERPRINT = f"loragraph-{own_version()}"


def mix_of(state: ServerState, body: GenerationBody, key: str) -> RequestMix:
    """The mix that a body asks for; see resolve_mix()."""
    return resolve_mix(
        state,
        body.model,
        body.lora,
        adapters_of(body),
        key=key,
        adapter_defaults=body.adapter_defaults,
    )


def adapters_of(body: GenerationBody) -> Any:
    """`adapters`, or the names of SGLang's `lora_path` in its place."""
    names = body.adapter_names()
    if names is None:
        return body.adapters
    if body.adapters is not None:
        raise InvalidRequestError("expected 'adapters' or 'lora_path', got both", param="lora_path")
    return names


def make_run(
    state: ServerState,
    body: GenerationBody,
    mix: RequestMix,
    tokens: list[int],
    params: SamplingParams,
    request_id: str,
    route: str,
    prompt_logprobs: int | None = None,
    n: int | None = None,
) -> Run:
    """A run of one prompt; `n`: its choices, where they are not those of the body.

    `request_id`: where the body names none itself.
    """
    salt = body.cache_salt or ""
    if body.cache_prompt is False:
        salt = f"{salt}/{secrets.token_hex(8)}"  # nobody else's, so nothing is found
    request = Request(
        prompt=tokens,
        adapters=mix.scales,
        params=params,
        n=n or body.n_choices,
        cache_salt=salt,
        deadline_s=state.config.deadline_s,
        prompt_logprobs=prompt_logprobs,
        generations=mix.generations,
    )
    return Run(state, request, mix, body.request_id or request_id, route)


def head(prefix: str, kind: str, request_id: str, model: str) -> dict[str, Any]:
    """The first fields of an answer, or of each chunk."""
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": _FINGERPRINT,
    }


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream is to end with its usage."""
    return bool(body.stream_options and body.stream_options.include_usage)
