"""Control tokens that mark calls: not part of texts, and yet the parser has to see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Choice, Event, Request
from loragraph.server import sse
from loragraph.server.mixes import RequestMix
from loragraph.server.openai import chat
from loragraph.server.openai.fields import ChatBody
from loragraph.server.runs import Run
from loragraph.server.tool_deltas import CallDeltas
from loragraph.server.tools import MistralCalls, ToolParser
from tests.server.serving import Served, serving, write_files
from tests.server.test_vllm_fields import text_of
from tests.tiny import TinyLlama
from tests.tiny_vocab import spm_metadata

TEMPLATE = "{{ tools }}[TOOL_CALLS]{% for message in messages %}{{ message.content }}{% endfor %}"
CALL = '[{"name": "now", "arguments": {}}]'
MARK = 3  # the token's id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose vocabulary has [TOOL_CALLS] as a control token."""
    folder: Path = tmp_path_factory.mktemp("marks")
    tokens: Any = spm_metadata(320)["tokenizer.ggml.tokens"]
    tokens = [*tokens[:MARK], "[TOOL_CALLS]", *tokens[MARK + 1 :]]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": TEMPLATE}
    write_files(folder, TinyLlama(extra=extra))
    with serving(folder) as one:
        yield one


@pytest.fixture
def job(served: Served) -> chat._Chat:
    """A chat with one tool."""
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "now"}}],
        }
    )
    request = Request([5], {}, SamplingParams())
    run = Run(served.state, request, RequestMix("base", {}), "req-1", "chat")
    marks = chat._marks(served.state, TEMPLATE)
    names = frozenset({"now"})

    def new_parser() -> ToolParser:
        return MistralCalls(names, CallDeltas(names, chat._n_most_calls(body)))

    return chat._Chat(served.state, body, run, new_parser, marks)


def entries_of(job: chat._Chat, events: list[Event]) -> list[dict[str, Any]]:
    """What a stream of these events has in its `choices`."""
    deltas = chat._ChoiceDeltas(job, 0, sse.Chunks(job.head))
    return [fields["choices"][0] for event in events for fields in deltas.of(event)]


def test_marks_are_control_tokens_of_the_template(job: chat._Chat) -> None:
    """Only those; <tool_call> is not in this template, and no token of this vocabulary."""
    assert job.marks == {MARK: "[TOOL_CALLS]"}


def test_a_stream_with_a_control_token_as_mark(job: chat._Chat) -> None:
    """The mark's event has no text, and yet the call is found."""
    pieces = [(" Yes.", 50), ("", MARK), (CALL[:9], 51), (CALL[9:], 52)]
    events = [Event(0, piece, token) for piece, token in pieces]
    entries = entries_of(job, [*events, Event(0, "", 2, "stop")])

    texts = "".join(entry["delta"].get("content", "") for entry in entries)
    calls = [call for entry in entries for call in entry["delta"].get("tool_calls", [])]
    assert texts == " Yes."
    assert [call["function"].get("name") for call in calls] == ["now", None]
    assert [call["function"]["arguments"] for call in calls] == ["", "{}"]
    assert entries[-1]["finish_reason"] == "tool_calls"


def test_a_whole_answer_with_a_control_token_as_mark(served: Served, job: chat._Chat) -> None:
    """The text is made again from the tokens, with the mark."""
    vocab = served.engine.model.vocab
    tokens = (
        *vocab.tokenize("Yes.", add_special=False),
        MARK,
        *vocab.tokenize(CALL, add_special=False),
    )
    text = vocab.detokenize(tokens, special=False)
    choice = Choice(0, text, tokens, "stop", None, 1, 0)

    entry = chat._choice(job, choice)

    assert entry["finish_reason"] == "tool_calls"
    assert "Yes." in entry["message"]["content"]
    assert json.loads(entry["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_one_call_where_parallel_calls_are_refused(job: chat._Chat) -> None:
    """parallel_tool_calls false: the first call counts, in a stream as in a whole answer."""
    job.body.parallel_tool_calls = False
    two = CALL[:-1] + "," + CALL[1:]
    vocab = job.state.engine.model.vocab
    tokens = (MARK, *vocab.tokenize(two, add_special=False))

    entries = entries_of(job, [Event(0, "", MARK), Event(0, two, 50, "stop")])
    whole = chat._choice(job, Choice(0, two, tokens, "stop", None, 1, 0))

    calls = [call for entry in entries for call in entry["delta"].get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert len(whole["message"]["tool_calls"]) == 1


def streamed_text(job: chat._Chat, events: list[Event]) -> str:
    """The content of a stream of these events."""
    return "".join(entry["delta"].get("content", "") for entry in entries_of(job, events))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [MARK, 70])
def test_a_stop_tokens_text_was_lost_beside_a_mark(
    job: chat._Chat, include: bool, stop: int
) -> None:
    """A whole answer whose text is made again ends as the stream's does."""
    vocab = job.state.engine.model.vocab
    params = SamplingParams(
        stop=("zz",), stop_token_ids=(stop,), include_stop_str_in_output=include
    )
    job.run.request = Request([5], {}, params)
    job = replace(job, marks={MARK: "[TOOL_CALLS]", 4: "[ARGS]"})
    words = vocab.tokenize("Yes.", add_special=False)
    pieces = [vocab.piece(token, special=False).decode() for token in words]
    ending = vocab.piece(stop, special=False).decode() if include else ""
    events = [Event(0, "", 4), *map(Event, [0] * len(words), pieces, words)]
    events.append(Event(0, ending, stop, "stop"))
    choice = Choice(0, "".join(pieces) + ending, (4, *words), "stop", None, 1, 0, stop_token=stop)

    text = "".join(("[ARGS]", *pieces, ending))
    if include:
        text += "[TOOL_CALLS]" if stop == MARK else ""
        assert ending or stop == MARK
    assert chat._marked_text(job, choice) == text
    assert streamed_text(replace(job, new_parser=None), events) == text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_stay_in_the_text_had_no_mark(served: Served, stream: bool) -> None:
    """parse_tool_calls false: what a client parses itself is all there."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "parse_tool_calls": False,
        "max_tokens": 2,
        "logit_bias": {str(MARK): 5000},
    }

    with served.client() as http:

        def text(**fields: Any) -> str:
            asked = {**body, "stream": stream, **fields}
            return text_of(http.post("/v1/chat/completions", json=asked))

        assert text() == "[TOOL_CALLS]" * 2
        assert text(skip_special_tokens=False) == "[TOOL_CALLS]" * 2
        assert text(stop_token_ids=[MARK]) == ""
        ended = text(stop_token_ids=[MARK], include_stop_str_in_output=True)
        assert ended == "[TOOL_CALLS]"
        assert text(tool_choice="none") == ""
