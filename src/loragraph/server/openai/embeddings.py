"""POST /v1/embeddings: what texts become in the base, or in it with adapters."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import Field, WithJsonSchema

from loragraph.engine.request import Embedding, Request
from loragraph.errors import InvalidRequestError
from loragraph.server.gate import ApiKey, RequestId
from loragraph.server.mixes import resolve_mix, uses_json
from loragraph.server.openai.fields import PROMPT_SCHEMA, Adapters, Lora
from loragraph.server.prompts import prompts_of
from loragraph.server.routing import api_router
from loragraph.server.runs import Run, do_all, timings_json, while_connected
from loragraph.server.sampling import Body
from loragraph.server.state import ServerState, State

router = api_router(tags=["openai"])


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]  # checked by prompts_of
    model: Annotated[str, Field(max_length=400)] | None = None
    lora: Lora | None = None
    adapters: Adapters | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # those of the model, no others
    pooling: Literal["mean", "last", "cls"] | None = None
    embd_normalize: Annotated[int, Field(ge=-1, le=1024)] | None = None  # llama-server's
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None
    user: Any = None  # ignored


@router.post("/v1/embeddings")
async def embeddings(
    body: EmbeddingBody, http: HttpRequest, state: State, request_id: RequestId, key: ApiKey
) -> JSONResponse:
    """An embedding for each input, in their order."""
    runs = await asyncio.to_thread(_prepare, state, body, request_id, key)
    normalize = 2 if body.embd_normalize is None else body.embd_normalize
    work = partial(Run.embed, pooling=body.pooling or "mean", normalize=normalize)
    found = await while_connected(http, do_all(runs, work))
    as_text = body.encoding_format == "base64"
    return JSONResponse(await asyncio.to_thread(_answer, runs[0].mix.model, found, as_text))


def _prepare(state: ServerState, body: EmbeddingBody, request_id: str, key: str) -> list[Run]:
    n_embd = state.engine.model.hparams.n_embd
    if body.dimensions not in (None, n_embd):
        raise InvalidRequestError(
            f"dimensions: expected {n_embd}, got {body.dimensions}", param="dimensions"
        )
    mix = resolve_mix(state, body.model, body.lora, body.adapters, key=key)
    return [
        Run(
            state,
            Request(
                prompt.tokens,
                mix.scales,
                cache_salt=body.cache_salt or "",
                deadline_s=state.config.deadline_s,
                generations=mix.generations,
            ),
            mix,
            request_id,
            "embeddings",
            names={"prompt": "input"},
        )
        for prompt in prompts_of(state, body.input, field="input")
    ]


def _answer(model: str, found: list[Embedding], as_text: bool) -> dict[str, Any]:
    n_prompt = sum(one.n_prompt for one in found)
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _values(one, as_text)}
        for index, one in enumerate(found)
    ]
    if len(found) > 1:  # each was computed at its own time
        for entry, one in zip(data, found, strict=True):
            entry["timings"] = timings_json(one)
    return {
        "object": "list",
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt,
            "prompt_tokens_details": {"cached_tokens": sum(one.n_cached for one in found)},
        },
        "adapters": uses_json(found[0].adapters),
        **({"timings": timings_json(found[0])} if len(found) == 1 else {}),
    }


def _values(one: Embedding, as_text: bool) -> list[float] | str:
    """Numbers, or their float32 little-endian bytes in base 64."""
    if not as_text:
        return [float(value) for value in one.values]
    return base64.b64encode(one.values.astype(np.dtype("<f4")).tobytes()).decode("ascii")
