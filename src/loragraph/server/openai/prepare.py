"""What chat and plain completions share on their way to the engine."""

from __future__ import annotations

import secrets
import time
from typing import Any

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.openai.fields import GenerationBody
from loragraph.server.runs import Run
from loragraph.server.state import ServerState


def mix_of(state: ServerState, body: GenerationBody, key: str) -> RequestMix:
    """The mix that a body asks for; see resolve_mix()."""
    return resolve_mix(
        state,
        body.model,
        body.lora,
        body.adapters,
        key=key,
        adapter_defaults=body.adapter_defaults,
    )


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
    """A run of one prompt; `n`: its choices, where they are not those of the body."""
    salt = body.cache_salt or ""
    if body.cache_prompt is False:
        salt = f"{salt}/{secrets.token_hex(8)}"  # nobody else's, so nothing is found
    request = Request(
        prompt=tokens,
        adapters=mix.scales,
        params=params,
        n=n or body.n or 1,
        cache_salt=salt,
        deadline_s=state.config.deadline_s,
        prompt_logprobs=prompt_logprobs,
        generations=mix.generations,
    )
    return Run(state, request, mix, request_id, route)


def head(prefix: str, kind: str, request_id: str, model: str) -> dict[str, Any]:
    """The first fields of an answer, or of each chunk."""
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream is to end with its usage."""
    return bool(body.stream_options and body.stream_options.include_usage)
