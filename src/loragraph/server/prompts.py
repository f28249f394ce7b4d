"""From a chat's messages and tools to token ids, by the model's template. Not on the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loragraph.errors import InvalidRequestError
from loragraph.server.errors import fields_as_sent
from loragraph.server.mixes import RequestMix
from loragraph.server.state import ServerState
from loragraph.vocab.chat import ChatTemplate

if TYPE_CHECKING:
    from loragraph.server.openai.fields import GenerationBody, Message, TemplateBody

_RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "timeout_s"),
        *("self", "raise_exception", "strftime_now"),
    )
)
_MARK = "\ue000loragraph:end\ue001"  # private use: no tokeniser's text


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt, or a rendered chat."""

    text: str
    tokens: list[int]


def chat_prompt(state: ServerState, mix: RequestMix, body: TemplateBody) -> TextPrompt:
    """The prompt of a chat; InvalidRequestError where the template cannot make one."""
    text = chat_text(state, mix, body)
    if body.add_special_tokens is False:
        vocab = state.engine.model.vocab
        return TextPrompt(text, vocab.tokenize(text, add_special=False, parse_special=True))
    return TextPrompt(text, tokens_of(state, text))


def truncated(
    state: ServerState, body: GenerationBody, prompts: list[TextPrompt]
) -> list[TextPrompt]:
    """The ends of prompts, as many tokens as vLLM's `truncate_prompt_tokens` says.

    -1: as many as fit before the answer, for which at most half of the limit is kept free, so that
    an answer without an end leaves a prompt.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompts
    if most == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens: expected -1, or at least 1 token, got 0",
            param="truncate_prompt_tokens",
        )
    if most < 0:
        wanted = body.max_completion_tokens or body.max_tokens or body.n_predict or 1
        limit = state.engine.config.sequence_limit
        most = max(1, limit - max(1, min(wanted, limit // 2)))
    vocab = state.engine.model.vocab
    cut = [prompt.tokens[-most:] for prompt in prompts]
    return [
        prompt
        if len(tokens) == len(prompt.tokens)
        else TextPrompt(vocab.detokenize(tokens, special=False), tokens)
        for prompt, tokens in zip(prompts, cut, strict=True)
    ]


def chat_text(state: ServerState, mix: RequestMix, body: TemplateBody) -> str:
    """The prompt's text, by the mix's template and with its system prompt and prefix."""
    template = mix.template(state)
    if template is None:
        raise InvalidRequestError(
            f"{state.base_name} has no chat template",
            param="messages",
            hint="send plain text to /v1/completions",
        )
    messages = mix.defaults.messages([_plain(message) for message in body.messages])
    variables = dict(body.chat_template_kwargs or {})
    reserved = _RESERVED & variables.keys()
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs: {min(reserved)!r} is given by its own field",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.documents is not None:
        variables["documents"] = body.documents
    goes_on = bool(body.continue_final_message)
    starts = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on:
        if starts:
            raise InvalidRequestError(
                "expected 'add_generation_prompt' or 'continue_final_message', got both",
                param="continue_final_message",
            )
        messages[-1] = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_MARK}"}
    tools = tools_of(template, body)
    text = template.render(messages, add_generation_prompt=starts, tools=tools, **variables)
    if goes_on:
        text, mark, _ = text.rpartition(_MARK)
        if not mark:
            raise InvalidRequestError(
                "the chat template does not show the last message, so it cannot be continued",
                param="continue_final_message",
            )
    return text


def tools_of(template: ChatTemplate | None, body: TemplateBody) -> list[dict[str, Any]] | None:
    """The tools as the template sees them; InvalidRequestError where it knows of none."""
    if not body.tools or body.tool_choice == "none":
        return None
    if template is not None and "tools" not in template.source:
        raise InvalidRequestError("the model's chat template has no place for tools", param="tools")
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def tokens_of(state: ServerState, text: str) -> list[int]:
    """Token ids of a rendered chat; BOS and EOS of template and vocabulary stand there once."""
    vocab = state.engine.model.vocab
    for token, added in ((vocab.bos, vocab.add_bos), (vocab.eos, vocab.add_eos)):
        if token is not None and added:
            own = vocab.piece(token).decode("utf-8", "replace")
            text = text.removeprefix(own) if token == vocab.bos else text.removesuffix(own)
    return vocab.tokenize(text, add_special=True, parse_special=True)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text for content, objects for arguments of calls."""
    out = message.model_dump(exclude_none=True)
    out["content"] = _text(message.content)
    if out["role"] == "developer":
        out["role"] = "system"
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    elif message.content is None and message.role != "assistant":
        raise InvalidRequestError(
            f"messages: expected content in the message of {message.role!r}", param="messages"
        )
    return out


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise InvalidRequestError(
                f"messages: expected parts of type text, got {kind!r:.40}", param="messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            "messages: expected tool_calls with a function's name", param="messages"
        )
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages: the arguments of {function['name']!r:.60} are no JSON",
                param="messages",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def prompts_of(
    state: ServerState, value: Any, *, field: str = "prompt", add_special: bool = True
) -> list[TextPrompt]:
    """The prompts of a field: a text, token ids, both mixed (one prompt), or a list of such."""
    with fields_as_sent({"prompt": field, "tokens": field}):
        if not isinstance(value, list) or not value or any(_is_id(part) for part in value):
            return [_prompt(state, value, field, add_special)]
        if len(value) > state.config.max_prompts:
            raise InvalidRequestError(
                f"{field}: expected at most {state.config.max_prompts} prompts, got {len(value)}",
                param=field,
            )
        return [_prompt(state, one, field, add_special) for one in value]


def _prompt(state: ServerState, value: Any, field: str, add_special: bool) -> TextPrompt:
    vocab = state.engine.model.vocab
    if isinstance(value, str):
        return TextPrompt(value, vocab.tokenize(value, add_special=add_special, parse_special=True))
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(
            f"{field}: expected a text, token ids, or a list of these, got {value!r:.60}",
            param=field,
        )
    tokens: list[int] = []
    for index, part in enumerate(value):
        if _is_id(part) and 0 <= part < vocab.n_tokens:
            tokens.append(part)
        elif isinstance(part, str):
            tokens += vocab.tokenize(
                part, add_special=add_special and index == 0, parse_special=True
            )
        else:
            raise InvalidRequestError(
                f"{field}: expected texts and token ids from 0 to {vocab.n_tokens - 1}, "
                f"got {part!r:.60}",
                param=field,
            )
    return TextPrompt(vocab.detokenize(tokens, special=False), tokens)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
