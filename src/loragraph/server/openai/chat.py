"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.request import Choice, Event, Result
from loragraph.errors import InvalidRequestError
from loragraph.server import sse
from loragraph.server.forms import cached_grammar, call_schema, grammar_of
from loragraph.server.gate import ApiKey, RequestId
from loragraph.server.openai.fields import ChatBody
from loragraph.server.openai.logprobs import chat_logprobs, of_events, prompt_logprobs_json
from loragraph.server.openai.prepare import as_sent, head, id_of, make_run, mix_of, wants_usage
from loragraph.server.openai.stream import Fields, chunks
from loragraph.server.prompts import chat_prompt, tools_of, truncated
from loragraph.server.routing import api_router
from loragraph.server.runs import Run, own_json, usage_json, while_connected
from loragraph.server.sampling import sampling_params
from loragraph.server.state import ServerState, State
from loragraph.server.tool_deltas import CallDeltas
from loragraph.server.tools import Parsed, ToolParser, control_texts, parser_for
from loragraph.vocab.stream import TextStream

router = api_router(tags=["openai"])


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat that is ready for the engine."""

    state: ServerState
    body: ChatBody
    run: Run
    new_parser: Callable[[], ToolParser] | None  # None: calls stay in the text
    marks: dict[int, str]  # control tokens that belong to the text of calls

    @property
    def head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return head("chatcmpl", kind, self.run.request_id, self.run.mix.model)

    def logprobs(self, events: Iterable[Event]) -> dict[str, Any] | None:
        if _n_logprobs(self.body) is None:
            return None
        return self.logprobs_of(of_events(events))

    def end_mark(self, token: int) -> str:
        """The mark that ends a text, where what ends it is wanted."""
        wanted = self.run.request.params.include_stop_str_in_output
        return self.marks.get(token, "") if wanted else ""

    def logprobs_of(self, found: Iterable[TokenLogprob]) -> dict[str, Any]:
        post = bool(self.body.post_sampling_probs)
        return chat_logprobs(self.state.engine.model.vocab, found, post=post)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(
    body: ChatBody, http: HttpRequest, state: State, request_id: RequestId, key: ApiKey
) -> Response:
    """An answer to a chat, whole or as a stream of chunks."""
    chat = await asyncio.to_thread(
        as_sent, _prepare, state, body, id_of(http, body, request_id), key
    )
    if body.stream:
        return await sse.event_stream(
            _chunks(chat),
            state.config.send_timeout_s,
            ping_s=state.config.ping_s(body.sse_ping_interval),
        )
    result = await while_connected(http, chat.run.finish())
    return JSONResponse(await asyncio.to_thread(_answer, chat, result))


def _prepare(state: ServerState, body: ChatBody, request_id: str, key: str) -> _Chat:
    body.check()
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs: only with 'logprobs': true", param="top_logprobs")
    if body.top_logprobs is not None and (body.n_probs or body.top_logprobs) != body.top_logprobs:
        raise InvalidRequestError(
            f"'top_logprobs' and 'n_probs' disagree: {body.top_logprobs} and {body.n_probs}",
            param="n_probs",
        )
    mix = mix_of(state, body, key)
    [prompt] = truncated(state, body, [chat_prompt(state, mix, body)])
    grammar = grammar_of(body)
    forced = call_schema(body)
    if forced is not None:
        if grammar is not None:
            raise InvalidRequestError(
                "tool_choice: a forced call leaves no room for another form of the answer",
                param="tool_choice",
            )
        grammar = cached_grammar(forced)
    logprobs = _n_logprobs(body)
    params = sampling_params(
        state, body, grammar=grammar, defaults=mix.defaults.params({}), logprobs=logprobs
    )
    run = make_run(
        *(state, body, mix, prompt.tokens, params, request_id, "chat"), body.prompt_logprobs
    )
    template = mix.template(state)
    if template is None or not tools_of(template, body):
        return _Chat(state, body, run, None, {})
    texts_have_marks = body.skip_special_tokens is False
    marks = {} if texts_have_marks else _marks(state, template.source)
    if body.parse_tool_calls is False:
        return _Chat(state, body, run, None, marks)
    names = frozenset(tool.function.name for tool in body.tools or ())

    def new_parser() -> ToolParser:
        deltas = CallDeltas(names, _n_most_calls(body)) if body.stream else None
        return parser_for(template.source, names, forced=forced is not None, deltas=deltas)

    return _Chat(state, body, run, new_parser, marks)


def _n_logprobs(body: ChatBody) -> int | None:
    """How many candidates are told beside each token; None: none, nor the token's own."""
    if not body.logprobs:
        return body.n_probs or None
    return (body.n_probs or 0) if body.top_logprobs is None else body.top_logprobs


def _n_most_calls(body: ChatBody) -> int | None:
    """How many calls a request wants of those written; None: all."""
    return 1 if body.parallel_tool_calls is False else None


def _marks(state: ServerState, template: str) -> dict[int, str]:
    """Control tokens, which the engine leaves out of texts, that mark calls."""
    vocab = state.engine.model.vocab
    marks = {}
    for text in control_texts(template):
        tokens = vocab.tokenize(text, add_special=False, parse_special=True)
        if len(tokens) == 1 and vocab.is_control(tokens[0]):
            marks[tokens[0]] = text
    return marks


# -- whole answers ---------------------------------------------------------------------------------


def _answer(chat: _Chat, result: Result) -> dict[str, Any]:
    choices = [_choice(chat, choice) for choice in result.choices]
    answer = {**chat.head, "choices": choices, "usage": usage_json([result]), **own_json(result)}
    if chat.body.prompt_logprobs is not None:
        vocab = chat.state.engine.model.vocab
        answer["prompt_logprobs"] = prompt_logprobs_json(vocab, result.prompt_logprobs)
    if chat.body.return_token_ids:
        answer["prompt_token_ids"] = list(chat.run.request.prompt)
    return answer


def _choice(chat: _Chat, choice: Choice) -> dict[str, Any]:
    text = _marked_text(chat, choice)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason: str = choice.finish_reason
    if chat.new_parser is not None:
        parser = chat.new_parser()
        parsed = parser.feed(text) + parser.flush()
        message["content"] = parsed.text or None
        if parsed.calls:
            message["tool_calls"] = [
                call.to_json() for call in parsed.calls[: _n_most_calls(chat.body)]
            ]
            reason = "tool_calls"
        elif message["content"] is None:
            message["content"] = ""
    out: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": choice.stop_string if choice.stop_string else choice.stop_token,
    }
    if _n_logprobs(chat.body) is not None:
        out["logprobs"] = chat.logprobs_of(choice.logprobs)
    if chat.body.return_token_ids:
        out["token_ids"] = list(choice.tokens)
    return out


def _marked_text(chat: _Chat, choice: Choice) -> str:
    """The text of a whole answer with the marks that the engine leaves out: as a stream has it."""
    if chat.marks.keys().isdisjoint((*choice.tokens, choice.stop_token)):
        return choice.text
    vocab, params = chat.state.engine.model.vocab, chat.run.request.params
    stream = TextStream(params.stop, keep_stop=params.include_stop_str_in_output)
    text = ""
    for number, token in enumerate(choice.tokens, 1):
        piece = vocab.piece(token, special=False)
        text += stream.feed(piece, may_stop=number > params.min_tokens)
        text += chat.marks.get(token, "")
    if choice.stop_token is None:
        return text + stream.flush()
    text += stream.end(vocab.piece(choice.stop_token, special=False))
    return text + chat.end_mark(choice.stop_token)


# -- streams ---------------------------------------------------------------------------------------


class _ChoiceDeltas:
    """One choice of a stream: what its events add."""

    def __init__(self, chat: _Chat, index: int, chunk: sse.Chunks) -> None:
        self._chat = chat
        self._index = index
        self._parser = None if chat.new_parser is None else chat.new_parser()
        self._has_calls = False
        self._begun = False
        self._plain = (
            self._parser is None
            and not chat.marks
            and _n_logprobs(chat.body) is None
            and not chat.body.return_token_ids
        )
        self.form = chunk.form(self._entry({"content": sse.MARK}))

    def text(self, event: Event) -> str | None:
        """The text of an event that adds nothing but text, which is the case of nearly all."""
        if self._plain and self._begun and event.finish_reason is None:
            return event.piece
        return None

    def of(self, event: Event) -> list[Fields]:
        """The chunks of an event: the role, what it adds, and the end."""
        out: list[Fields] = [] if self._begun else [self._opening()]
        self._begun = True
        logprobs = self._chat.logprobs([event])
        ids = None
        if self._chat.body.return_token_ids:
            ids = [] if event.token is None else [event.token]
        for delta in self._deltas(self._feed(event)) or [{}]:
            if delta or (logprobs and logprobs["content"]) or ids is not None:
                entry = {**self._entry(delta), "logprobs": logprobs}
                out.append({"choices": [entry if ids is None else {**entry, "token_ids": ids}]})
            logprobs, ids = None, ids and []  # they were told
        if event.finish_reason is not None:
            reason = "tool_calls" if self._has_calls else event.finish_reason
            out.append({"choices": [{**self._entry({}), "finish_reason": reason}]})
        return out

    def _opening(self) -> Fields:
        """The first chunk, with what is known of the prompt."""
        chat = self._chat
        fields: Fields = {"choices": [self._entry({"role": "assistant", "content": ""})]}
        if chat.body.prompt_logprobs is not None and self._index == 0:  # the first of all
            vocab = chat.state.engine.model.vocab
            fields["prompt_logprobs"] = prompt_logprobs_json(vocab, chat.run.prompt_logprobs)
        if chat.body.return_token_ids:
            fields["prompt_token_ids"] = list(chat.run.request.prompt)
        return fields

    def _deltas(self, parsed: Parsed) -> list[dict[str, Any]]:
        """What was parsed, one call's news each."""
        self._has_calls |= bool(parsed.calls)
        deltas: list[dict[str, Any]] = [{"content": parsed.text}] if parsed.text else []
        return deltas + [{"tool_calls": [delta.to_json()]} for delta in parsed.deltas]

    def _feed(self, event: Event) -> Parsed:
        text = event.piece + self._mark(event)
        if self._parser is None:
            return Parsed(text)
        parsed = self._parser.feed(text)
        return parsed if event.finish_reason is None else parsed + self._parser.flush()

    def _mark(self, event: Event) -> str:
        """The text of a control token that marks calls."""
        chat = self._chat
        if event.token is None or event.token not in chat.marks:
            return ""
        stops = *chat.run.request.params.stop_token_ids, *chat.state.engine.model.vocab.eog_tokens
        if event.finish_reason == "stop" and event.token in stops:
            return chat.end_mark(event.token)
        return chat.marks[event.token]

    def _entry(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chunks(chat: _Chat) -> AsyncGenerator[bytes, None]:
    chunk = sse.Chunks(chat.head)
    choices = [_ChoiceDeltas(chat, index, chunk) for index in range(chat.run.request.n)]
    return chunks(chunk, [chat.run], choices, with_usage=wants_usage(chat.body))
