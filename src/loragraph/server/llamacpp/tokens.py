"""POST /tokenize, /detokenize, /apply-template: text to tokens and back, without computing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from loragraph.errors import InvalidRequestError
from loragraph.server.errors import fields_as_sent
from loragraph.server.gate import ApiKey
from loragraph.server.mixes import RequestMix, resolve_mix
from loragraph.server.openai.fields import Messages, TemplateBody, Tools
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
    """A text, or texts and token ids in turn; or vLLM's fields: a `prompt`, or a chat."""

    content: str | list[str | Token] = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    # vLLM's
    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Lenient):
    """Token ids; `model` is vLLM's."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS)] = []


class ApplyTemplateBody(TemplateBody):
    """A chat as for /v1/chat/completions; fields that choose tokens mean nothing here."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    lora: Any = None
    adapters: Any = None
    adapter_defaults: bool | None = None


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, state: State, key: ApiKey) -> dict[str, Any]:
    """Token ids, or {id, piece} each; a piece that is no UTF-8 is a list of bytes.

    With `prompt` or `messages` vLLM's answer: the ids, and how many they are.
    """
    if body.prompt is not None or body.messages is not None:
        return await asyncio.to_thread(_tokenize_as_vllm, state, body, key)
    return {"tokens": await asyncio.to_thread(_tokenize, state.engine.model.vocab, body)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, state: State, key: ApiKey) -> dict[str, Any]:
    """The text of token ids; for a client of vLLM's, which names a model, by its name too."""
    text = await asyncio.to_thread(_detokenize, state, body, key)
    return {"content": text} if body.model is None else {"content": text, "prompt": text}


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateBody, state: State, key: ApiKey) -> dict[str, Any]:
    """The prompt that a chat becomes, with the defaults of the adapters it names."""
    return {"prompt": await asyncio.to_thread(_render, state, body, key)}


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def input_tokens(body: ApplyTemplateBody, state: State, key: ApiKey) -> dict[str, Any]:
    """How many tokens the prompt of a chat has."""
    tokens = await asyncio.to_thread(_chat_tokens, state, body, key)
    return {"input_tokens": len(tokens), "object": "response.input_tokens"}


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
    with fields_as_sent({"prompt": "content", "tokens": "content"}):
        tokens = tokenize_mixed(
            vocab, body.content, add_special=body.add_special, parse_special=body.parse_special
        )
    if not body.with_pieces:
        return tokens
    return [{"id": token, "piece": _piece(vocab.piece(token))} for token in tokens]


def _tokenize_as_vllm(state: ServerState, body: TokenizeBody, key: str) -> dict[str, Any]:
    """Its default is a text with what the vocabulary adds to one."""
    vocab = state.engine.model.vocab
    given = ["messages"] * (body.messages is not None) + ["content"] * bool(body.content)
    given += ["prompt"] * (body.prompt is not None)
    if len(given) > 1:
        raise InvalidRequestError(
            f"expected one of 'content', 'prompt' and 'messages', got {' and '.join(given)}",
            param=given[-1],
        )
    if body.prompt is not None:
        _require_model(state, body.model, key)
        begins = body.add_special_tokens is not False
        tokens = vocab.tokenize(body.prompt, add_special=begins, parse_special=True)
    else:
        names = TokenizeBody.model_fields.keys() & ApplyTemplateBody.model_fields.keys()
        fields = {name: getattr(body, name) for name in names}
        tokens = _chat_tokens(state, ApplyTemplateBody.model_construct(**fields), key)
    return {
        "count": len(tokens),
        "max_model_len": state.engine.config.sequence_limit,
        "tokens": tokens,
        "token_strs": [vocab.piece(token).decode("utf-8", "replace") for token in tokens]
        if body.return_token_strs
        else None,
    }


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _detokenize(state: ServerState, body: DetokenizeBody, key: str) -> str:
    _require_model(state, body.model, key)
    return state.engine.model.vocab.detokenize(body.tokens)


def _require_model(state: ServerState, model: str | None, key: str) -> None:
    """ModelNotFoundError, PermissionDeniedError: as a request for an answer of that model."""
    if model is not None:
        resolve_mix(state, model, key=key)


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


def _chat_tokens(state: ServerState, body: ApplyTemplateBody, key: str) -> list[int]:
    with fields_as_sent({"prompt": "messages"}):
        return chat_prompt(state, _mix(state, body, key), body).tokens
