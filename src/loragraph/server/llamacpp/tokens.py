"""POST /tokenize, /detokenize, /apply-template: text to tokens and back, without computing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from loragraph.server.gate import ApiKey
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.openai.fields import TemplateBody
from loragraph.server.prompts import chat_prompt, chat_text
from loragraph.server.routing import api_router
from loragraph.server.state import ServerState, State
from loragraph.vocab.vocab import Vocab

router = api_router(tags=["llama-server"])

MAX_TOKENS = 1 << 20
"""Token ids in one request for their text."""

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Lenient(BaseModel):
    """Further fields are allowed, as llama-server has it."""

    model_config = ConfigDict(extra="allow", strict=True)


class TokenizeBody(_Lenient):
    """A text, or texts and token ids in turn."""

    content: str | list[str | Token] = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(_Lenient):
    """Token ids."""

    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS)] = []


class ApplyTemplateBody(TemplateBody):
    """A chat as for /v1/chat/completions; fields that choose tokens mean nothing here."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    lora: Any = None
    adapters: Any = None
    adapter_defaults: bool | None = None


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, state: State) -> dict[str, Any]:
    """Token ids, or {id, piece} each; a piece that is no UTF-8 is a list of bytes."""
    return {"tokens": await asyncio.to_thread(_tokenize, state.engine.model.vocab, body)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, state: State) -> dict[str, Any]:
    """The text of token ids."""
    vocab = state.engine.model.vocab
    return {"content": await asyncio.to_thread(vocab.detokenize, body.tokens)}


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, state: State, key: ApiKey) -> dict[str, Any]:
    """The prompt that a chat becomes, with the defaults of the adapters it names."""
    return {"prompt": await asyncio.to_thread(_render, state, body, key)}


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def input_tokens(body: ApplyTemplateBody, state: State, key: ApiKey) -> dict[str, Any]:
    """How many tokens the prompt of a chat has."""
    n = await asyncio.to_thread(_count, state, body, key)
    return {"input_tokens": n, "object": "response.input_tokens"}


def tokenize_mixed(
    vocab: Vocab, parts: str | list[str | int], *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Tokens of a text, or of texts and token ids in turn.

    What the vocabulary adds, it adds to a text that stands first.
    """
    if isinstance(parts, str):
        return vocab.tokenize(parts, add_special=add_special, parse_special=parse_special)
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            begins = add_special and i == 0
            tokens += vocab.tokenize(part, add_special=begins, parse_special=parse_special)
        else:
            tokens.append(part)
    return tokens


def _tokenize(vocab: Vocab, body: TokenizeBody) -> list[Any]:
    tokens = tokenize_mixed(
        vocab, body.content, add_special=body.add_special, parse_special=body.parse_special
    )
    if not body.with_pieces:
        return tokens
    return [{"id": token, "piece": _piece(vocab.piece(token))} for token in tokens]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _mix(state: ServerState, body: ApplyTemplateBody, key: str) -> RequestMix:
    return resolve_mix(
        state,
        body.model,
        body.lora,
        body.adapters,
        key=key,
        adapter_defaults=body.adapter_defaults,
    )


def _render(state: ServerState, body: ApplyTemplateBody, key: str) -> str:
    return chat_text(state, _mix(state, body, key), body)


def _count(state: ServerState, body: ApplyTemplateBody, key: str) -> int:
    return len(chat_prompt(state, _mix(state, body, key), body).tokens)
