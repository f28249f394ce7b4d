"""Routes of llama-server that this server does not have: 501, in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import NoReturn

from fastapi import APIRouter

from loragraph.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_EMBEDDINGS = "This server has OpenAI's route for embeddings alone: POST /v1/embeddings"
_RERANK = "This server does not support reranking: its base is a generating model"
_LOAD = "This server serves one base; adapters are loaded with POST /v1/load_lora_adapter"
_ROUTES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("/embedding", "/embeddings"), _EMBEDDINGS),
    (("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), _RERANK),
    (("/models", "/models/load", "/models/unload"), _LOAD),
    (("/v1/audio/transcriptions", "/audio/transcriptions"), "This server reads text alone"),
    (
        ("/v1/responses", "/responses"),
        "This server has no Responses API: POST /v1/chat/completions",
    ),
    (
        ("/v1/messages", "/v1/messages/count_tokens"),
        "This server has no Anthropic API: POST /v1/chat/completions",
    ),
    (("/v1/chat/completions/control",), "This server does not control reasoning"),
)


def _refusal(message: str) -> Callable[[], Coroutine[None, None, NoReturn]]:
    async def refuse() -> NoReturn:
        raise ApiError(501, message)

    return refuse


for _paths, _message in _ROUTES:
    for _path in _paths:
        router.add_api_route(_path, _refusal(_message), methods=["POST"], response_model=None)
