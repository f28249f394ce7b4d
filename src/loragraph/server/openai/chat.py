"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from loragraph.engine.request import Request, Result
from loragraph.engine.sampler import SamplingParams
from loragraph.server import sse
from loragraph.server.gate import RequestId
from loragraph.server.mixes import resolve_mix
from loragraph.server.routing import api_router
from loragraph.server.runs import Run, own_json, usage_json, while_connected
from loragraph.server.state import State

router = api_router(tags=["openai"])


class ChatBody(BaseModel):
    """The fields."""

    messages: list[dict[str, Any]]
    model: str | None = None
    lora: Any = None
    adapters: Any = None
    stream: bool = False
    temperature: float = 0.8
    max_tokens: int | None = None


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(
    body: ChatBody, http: HttpRequest, state: State, request_id: RequestId
) -> Response:
    """An answer to a chat."""
    mix = await asyncio.to_thread(resolve_mix, state, body.model, body.lora, body.adapters)
    params = SamplingParams(temperature=body.temperature, max_tokens=body.max_tokens)
    run = Run(state, Request(body.messages, mix.scales, params), mix, request_id, "chat")
    if body.stream:
        return await sse.event_stream(_chunks(run), state.config.send_timeout_s)
    result = await while_connected(http, run.finish())
    return JSONResponse(_answer(run, result))


def _head(run: Run, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{run.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": run.mix.model,
    }


def _answer(run: Run, result: Result) -> dict[str, Any]:
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "finish_reason": choice.finish_reason,
        }
        for choice in result.choices
    ]
    head = _head(run, "chat.completion")
    return {**head, "choices": choices, "usage": usage_json([result]), **own_json(result)}


async def _chunks(run: Run) -> AsyncGenerator[bytes, None]:
    head = _head(run, "chat.completion.chunk")
    async for batch in run.events():
        choices = [
            {
                "index": event.index,
                "delta": {"content": event.piece},
                "finish_reason": event.finish_reason,
            }
            for event in batch
        ]
        yield sse.data({**head, "choices": choices})
    assert run.result is not None
    usage = usage_json([run.result])
    yield sse.data({**head, "choices": [], "usage": usage, **own_json(run.result)})
