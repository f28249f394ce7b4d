"""What is wrong with a request: llama-server's status and body, and an unharmed engine."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.serving import Served

INVALID = "invalid_request_error"


def refused(answer: httpx.Response, status: int, kind: str, phrase: str) -> dict[str, Any]:
    """The error of an answer, which has llama-server's shape."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, status, kind), error
    assert phrase in error["message"]
    assert "Traceback" not in answer.text
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"prompt": None}, "prompt: the field is missing"),
        ({"prompt": []}, "must not be empty"),
        ({"prompt": [[]]}, "must not be empty"),
        ({"prompt": 5}, "prompt: expected a text"),
        ({"prompt": True}, "prompt: expected a text"),
        ({"prompt": [1.5]}, "prompt: expected a text"),
        ({"prompt": [True, 5]}, "prompt: expected a text"),
        ({"prompt": [99999]}, "token ids"),
        ({"prompt": [-1]}, "token ids"),
        ({"prompt": [2**70]}, "token ids"),
        ({"prompt": {"text": "a"}}, "prompt: expected a text"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "multimodal"),
        ({"prompt": ["a"] * 5000}, "at most 2048 prompts"),
        ({"prompt": "\ud800"}, "no JSON"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 2}, "top_p"),
        ({"n_predict": "5"}, "n_predict"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
        ({"n_probs": 10_000}, "logprobs"),
        ({"n_probs": -1}, "logprobs"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"n_cmpl": 100_000}, "n_cmpl"),
        ({"n": 0}, "n:"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[1, 10**400]]}, "logit_bias"),
        ({"logit_bias": [[99999, 1]]}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "root ::= nowhere"}, "grammar"),
        ({"grammar": "x ::= root"}, "grammar"),
        ({"grammar": "root ::= " + "(" * 20_000}, "grammar"),
        ({"grammar": 5}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "JSON schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "JSON schema"),
        ({"samplers": ["temperature", "top_k"]}, "samplers"),
        ({"samplers": ["magic"]}, "samplers"),
        ({"samplers": "q"}, "samplers"),
        ({"response_fields": "content"}, "response_fields"),
        ({"response_fields": [5]}, "response_fields"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"min_keep": -5}, "min_keep"),
        ({"n_indent": 4}, "n_indent"),
        ({"grammar_lazy": True, "grammar": 'root ::= "a"'}, "grammar_lazy"),
        ({"post_sampling_probs": 1, "n_probs": 2}, "post_sampling_probs"),
        ({"adaptive_target": 0.5}, "adaptive_target"),
        ({"speculative.n_max": 16}, "speculative decoding"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field(
    http: httpx.Client, fields: dict[str, Any], phrase: str, stream: bool
) -> None:
    """400, which names it, before a stream has begun."""
    body = {"prompt": "hello", "stream": stream, **fields}
    answer = http.post("/completion", content=json.dumps(body))

    refused(answer, 400, INVALID, phrase)


def test_a_prompt_that_is_too_long(http: httpx.Client) -> None:
    """exceed_context_size_error with both numbers."""
    for body in ({"prompt": [5] * 2000}, {"prompt": "x" * 3000}, {"prompt": ["a", [5] * 2000]}):
        answer = http.post("/completion", json=body)

        error = refused(answer, 400, "exceed_context_size_error", "at most 1023 tokens")
        assert error["n_prompt_tokens"] >= 2000
        assert error["n_ctx"] == 1024


@pytest.mark.parametrize("route", ["/completion", "/tokenize", "/detokenize", "/lora-adapters"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nope",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_a_body_that_is_no_object(http: httpx.Client, route: str, body: bytes) -> None:
    """Not JSON, not UTF-8, too deep, or of another kind: 400."""
    answer = http.post(route, content=body)

    refused(answer, 400, INVALID, "")


def test_a_huge_body_is_refused_unread(http: httpx.Client) -> None:
    """413 beyond the limit."""
    answer = http.post("/completion", content=b'{"prompt": "' + b"x" * (17 << 20) + b'"}')

    assert answer.status_code == 413


@pytest.mark.parametrize(
    "route",
    [
        *("/embedding", "/embeddings", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
        *("/slots/0", "/models/load", "/v1/responses", "/v1/messages", "/infill"),
        *("/v1/audio/transcriptions", "/v1/chat/completions/control"),
    ],
)
def test_what_there_is_not(http: httpx.Client, route: str) -> None:
    """501 not_supported_error, as for what llama-server was started without."""
    answer = http.post(route, json={"input_prefix": "a", "input_suffix": "b", "content": "x"})

    refused(answer, 501, "not_supported_error", "")


def test_get_where_post_is_meant(http: httpx.Client) -> None:
    """405 in the shape of errors."""
    refused(http.get("/completion"), 405, INVALID, "GET")


def test_no_candidate_left_ends_the_stream_with_an_error(http: httpx.Client) -> None:
    """What goes wrong after the first token is an event of its own."""
    body = {"prompt": "a", "grammar": 'root ::= "ab"', "ignore_eos": True, "stream": True}
    with http.stream("POST", "/completion", json={**body, "temperature": 0}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]

    assert answer.status_code == 200
    assert events[-1]["error"]["type"] == INVALID
    assert not any(event.get("stop") for event in events)


def test_while_draining(served: Served) -> None:
    """503 for generations and /health; what only reads still answers."""
    phase = served.state.phase
    try:
        served.state.drain()
        with served.client() as http:
            answer = http.post("/completion", json={"prompt": "a", "n_predict": 1})
            refused(answer, 503, "unavailable_error", "shutting down")
            refused(http.get("/health"), 503, "unavailable_error", "")
            assert http.post("/tokenize", json={"content": "a"}).status_code == 200
    finally:
        served.state._phase = phase
