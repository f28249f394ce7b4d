"""What clients get wrong: a status and a body that tell, and an engine that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.vocab.vocab import MAX_SPECIALS
from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyLlama

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with few cells and a short queue."""
    folder = tmp_path_factory.mktemp("short")
    write_files(folder)
    with serving(folder, n_ctx=64, max_sequences=1, max_waiting=1) as one:
        yield one


@pytest.fixture
def client(short: Served) -> Iterator[httpx.Client]:
    """A client of it; after the test it still answers, and nothing is left in it."""
    with short.client() as one:
        yield one
        after = one.post(TEXT, json={"prompt": "a", "max_tokens": 2, "temperature": 0})
        assert after.status_code == 200
        assert after.json()["usage"]["completion_tokens"] <= 2
    assert not short.state.runs
    assert short.engine.stats().core.n_jobs == 0


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer that has this status."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    found: dict[str, Any] = body["error"]
    of_openai = answer.url.path.startswith(("/v1/c", "/v1/e", "/v1/models"))
    assert found["code"] == (found.get("reason", status) if of_openai else status)
    assert isinstance(found["type"], str)
    assert found["message"]
    assert "Traceback" not in answer.text
    return found


LONG = "hello " * 3000
FORCED = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a", "guided_regex": "(?=a)"}, "guided_regex"),
        (TEXT, {"prompt": "a", "regex": "(?=a)"}, "regex"),
        (TEXT, {"prompt": "a", "guided_json": {"type": "x"}}, "guided_json"),
        (TEXT, {"prompt": "a", "guided_json": {"pattern": "(?=a)"}}, "guided_json"),
        (TEXT, {"prompt": "a", "guided_grammar": "root ::= x"}, "guided_grammar"),
        (TEXT, {"prompt": "a", "ebnf": "root ::= x"}, "ebnf"),
        (
            TEXT,
            {"prompt": "a", "structured_outputs": {"grammar": "root ::= x"}},
            "structured_outputs.grammar",
        ),
        (TEXT, {"prompt": "a", "grammar": "root ::= x"}, "grammar"),
        (
            TEXT,
            {"prompt": "a", "json_schema": {"type": "string", "pattern": "(?=a)"}},
            "json_schema",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_object", "schema": {"type": "x"}}},
            "response_format",
        ),
        (CHAT, {"messages": HI, "tools": [FORCED], "tool_choice": "required"}, "tools"),
        (TEXT, {"prompt": "a", "lora_path": "alpha", "model": "beta"}, "lora_path"),
        (TEXT, {"prompt": "a", "lora_path": "alpha", "lora": {"beta": 1}}, "lora_path"),
        (TEXT, {"prompt": "a", "adapters": ["alpha"], "model": "beta"}, "adapters"),
        (TEXT, {"prompt": "a", "n_probs": 5000}, "n_probs"),
        (TEXT, {"prompt": "a", "logprobs": 5000}, "logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
        (CHAT, {"messages": HI, "n_probs": 5000}, "n_probs"),
        (TEXT, {"prompt": "a", "repetition_penalty": -1}, "repetition_penalty"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (TEXT, {"prompt": LONG}, "prompt"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/completion", {"prompt": "a", "n_probs": 5000}, "n_probs"),
        ("/completion", {"prompt": "a", "logprobs": 5000}, "logprobs"),
        (
            "/completion",
            {"prompt": "a", "json_schema": {"type": "string", "pattern": "(?=a)"}},
            "json_schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_named_fields_that_were_not_sent(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    """`param` is the body's own word, and not the engine's or the other one of the same thing."""
    if stream and "embeddings" not in path:
        body = {**body, "stream": True}

    assert error(client.post(path, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "messages"),
        (TEXT, "prompt"),
        ("/v1/embeddings", "input"),
        ("/tokenize", "content"),
        ("/tokenize", "prompt"),
        ("/tokenize", "messages"),
    ],
)
def test_texts_that_have_no_tokens_were_called_prompts(
    client: httpx.Client, path: str, field: str
) -> None:
    """The field that has such a text is named."""
    text = "<|im_start|>" * (MAX_SPECIALS + 1)
    value = [{"role": "user", "content": text}] if field == "messages" else text

    assert error(client.post(path, json={field: value}), 400)["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [3]}, "messages.0"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": HI, "temperature": 1e9}, "temperature"),
        (CHAT, {"messages": HI, "top_p": 2}, "top_p"),
        (CHAT, {"messages": HI, "n": 0}, "n"),
        (CHAT, {"messages": HI, "n": 1000}, "n"),
        (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"messages": HI, "stop": [""]}, "stop"),
        (CHAT, {"messages": HI, "stop": 3}, "stop"),
        (CHAT, {"messages": HI, "nonsense": 1}, "nonsense"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 999}, "top_logprobs"),
        (CHAT, {"messages": HI, "logit_bias": {"x y": 1.5e5}}, "logit_bias"),
        (CHAT, {"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias"),
        (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": HI, "modalities": ["audio"]}, "modalities"),
        (CHAT, {"messages": HI, "samplers": ["temperature", "top_k"]}, "samplers"),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": HI, "lora": 3}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"id": 99, "scale": 1}]}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"name": "alpha"}]}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"scale": 1}]}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"id": 0, "scale": "1"}]}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"id": 0, "scale": 1e39}]}, "lora"),
        (CHAT, {"messages": HI, "lora": [{"id": 0, "scale": 1}] * 2}, "lora"),
        (CHAT, {"messages": HI, "lora": {"alpha": 1}, "adapters": {"beta": 1}}, "adapters"),
        (CHAT, {"messages": HI, "model": "alpha", "lora": {"beta": 1}}, "lora"),
        (CHAT, {"messages": HI, "grammar": "root ::= ("}, "grammar"),
        (CHAT, {"messages": HI, "grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": HI, "json_schema": {"type": "x"}}, "json_schema"),
        (CHAT, {"messages": HI, "json_schema": {"$ref": "file:///etc/passwd"}}, "json_schema"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, None),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": {}}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 3000}, "prompt"),
        (TEXT, {"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids.0"),
        (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
        (TEXT, {"prompt": "a", "cache_salt": 3}, "cache_salt"),
        (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"}, "lora_path"),
    ],
)
def test_wrong_fields_are_400(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    """A field that is missing, wrong or not supported is a 400 that names it."""
    answer = client.post(path, json=body)

    if answer.status_code == 200:  # an empty text is a prompt where the vocabulary adds BOS
        assert body == {"prompt": ""}
    else:
        assert error(answer, 400)["param"] == param


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", 400),
        (b'"text"', 400),
        (b"null", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "prompt": 3}', 400),
        (b" " * (17 << 20), 413),
    ],
)
def test_wrong_bodies(client: httpx.Client, content: bytes, status: int) -> None:
    """What is no JSON object, or too large, is refused, whatever it is."""
    error(client.post(TEXT, content=content, headers={"Content-Type": "text/plain"}), status)


def test_unknown_models_are_404(client: httpx.Client) -> None:
    """With the names that there are."""
    for body in ({"model": "nope"}, {"lora": {"nope": 0}}, {"model": "base:nope"}):
        found = error(client.post(TEXT, json={"prompt": "a", **body}), 404)
        assert "alpha" in found["message"]
        assert found["reason"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_is_refused(client: httpx.Client, stream: bool) -> None:
    """With llama-server's type and OpenAI's code, before a stream begins too."""
    body = {"prompt": [5] * 65, "stream": stream}

    found = error(client.post(TEXT, json=body), 400)

    assert found["type"] == "exceed_context_size_error"
    assert found["reason"] == "context_length_exceeded"


def test_a_full_answer_ends_with_length(client: httpx.Client) -> None:
    """No context shift: an answer that fills its sequence ends."""
    got = client.post(TEXT, json={"prompt": "a", "ignore_eos": True, "temperature": 0}).json()

    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 64


def test_a_full_queue_is_429(client: httpx.Client) -> None:
    """Those that find no place are told so, with a time to try again; the others are served."""
    bodies = [
        {"prompt": f"{i} a b", "ignore_eos": True, "max_tokens": 55, "stream": True}
        for i in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: client.post(TEXT, json=body), bodies))
    statuses = sorted(answer.status_code for answer in answers)

    assert statuses[0] == 200
    assert statuses[-1] == 429
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    error(refused, 429)
    for answer in answers:
        if answer.status_code == 200:
            assert answer.text.endswith("data: [DONE]\n\n")


def test_a_template_that_never_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model's template that would run for ever is stopped, with a 400."""
    folder = tmp_path_factory.mktemp("endless")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    write_files(folder, TinyLlama(extra={"tokenizer.chat_template": endless}))
    with serving(folder) as one, one.client() as client:
        found = error(client.post(CHAT, json={"messages": HI}), 400)
        assert "steps" in found["message"] or "s, got more" in found["message"]
        assert client.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_error_events_in_mid_stream(short: Served, client: httpx.Client) -> None:
    """What fails after the stream began is an event with an error's body, and then the end."""
    original = short.engine._core._runner.run
    n_left = 5

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise MemoryError
        return original(*args, **kwargs)

    short.engine._core._runner.run = fails  # type: ignore[method-assign]
    try:
        body = {"prompt": "a", "ignore_eos": True, "stream": True}
        with client.stream("POST", TEXT, json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
    finally:
        short.engine._core._runner.run = original  # type: ignore[method-assign]

    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["error"]["code"] == 503
    assert json.loads(lines[0].removeprefix("data: "))["choices"]
