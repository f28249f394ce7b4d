"""What chat and plain completions share on their way to the engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastapi import Request as HttpRequest

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import InvalidRequestError
from loragraph.server.errors import fields_as_sent
from loragraph.server.gate import request_name
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.openai.fields import ChatBody, GenerationBody
from loragraph.server.routing import own_version
from loragraph.server.runs import Run
from loragraph.server.sampling import sent_names
from loragraph.server.state import ServerState

_FINGERPRINT = f"loragraph-{own_version()}"

_FORM_PARAMS = ("grammar", "json_schema", "pattern")

B = TypeVar("B", bound=GenerationBody)
P = ParamSpec("P")
T = TypeVar("T")


def as_sent(
    prepare: Callable[Concatenate[ServerState, B, P], T],
    state: ServerState,
    body: B,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """What `prepare` makes of a body; its errors name the body's fields."""
    with fields_as_sent(field_names(body)):
        return prepare(state, body, *args, **kwargs)


def field_names(body: GenerationBody) -> dict[str, str]:
    """The fields of a body by what the rest of the program calls them, where that differs."""
    more: dict[str, tuple[str, ...]] = {"adapters": ("adapters", "lora_path")}
    if isinstance(body, ChatBody):
        more |= {"logprobs": ("top_logprobs", "n_probs"), "prompt": ("messages",)}
    else:
        more |= {"logprobs": ("logprobs", "n_probs")}
    names, form = sent_names(body, more), _form(body)
    if form is not None:
        names |= {name: form for name in _FORM_PARAMS if getattr(body, name, None) is None}
    return names


def _form(body: GenerationBody) -> str | None:
    """The field that says what form the answer takes."""
    if body.grammar is not None:
        return "grammar"
    if body.json_schema is not None:
        return "json_schema"
    for field in body.forms():
        return field
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    forced = isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto")
    return "tools" if forced else None


def id_of(http: HttpRequest, body: GenerationBody, request_id: str) -> str:
    """The id that a request goes by: its body's, in its header's place, for log and answer too."""
    if body.request_id is None:
        return request_id
    request_name(http.scope).id = body.request_id
    return body.request_id


def mix_of(state: ServerState, body: GenerationBody, key: str) -> RequestMix:
    """The mix that a body asks for; see resolve_mix()."""
    return resolve_mix(
        state,
        body.model,
        body.lora,
        adapters_of(body),
        key=key,
        adapter_defaults=body.adapter_defaults,
        adapters_field="adapters" if body.lora_path is None else "lora_path",
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
    """A run of one prompt; `n`: its choices, where they are not those of the body."""
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
    names = field_names(body)
    return Run(state, request, mix, request_id, route, names=names)


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
