"""POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.server.serving import Served


def test_there_and_back(http: httpx.Client) -> None:
    """The text of its tokens is the text."""
    tokens = http.post("/tokenize", json={"content": "hello wörld"}).json()["tokens"]

    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": "hello wörld"}


def test_bos_and_control_tokens(http: httpx.Client) -> None:
    """add_special is off and parse_special on unless told otherwise."""

    def tokens(**fields: Any) -> list[int]:
        body = {"content": "<|im_start|>", **fields}
        found = http.post("/tokenize", json=body).json()["tokens"]
        assert isinstance(found, list)
        return found

    assert tokens()[-1] == 3
    assert 1 not in tokens()
    assert tokens(add_special=True)[0] == 1
    assert 3 not in tokens(parse_special=False)


def test_pieces(http: httpx.Client) -> None:
    """Texts, or bytes where a token is no whole character."""
    body = {"content": "the á", "with_pieces": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]

    assert tokens[0].keys() == {"id", "piece"}
    assert [token["piece"] for token in tokens][-2:] == [[195], [161]]
    assert "the" in tokens[0]["piece"]


def test_mixed_content(http: httpx.Client, served: Served) -> None:
    """Ids stand for themselves between texts; BOS goes to a text that is first."""
    vocab = served.engine.model.vocab
    body = {"content": ["the", 300, " world"], "add_special": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]

    assert tokens == [*vocab.tokenize("the"), 300, *vocab.tokenize(" world", add_special=False)]


def test_nothing_is_nothing(http: httpx.Client) -> None:
    """Missing fields are an empty text and no tokens."""
    assert http.post("/tokenize", json={}).json() == {"tokens": []}
    assert http.post("/detokenize", json={}).json() == {"content": ""}


@pytest.mark.parametrize(
    ("route", "body", "phrase"),
    [
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": [{"a": 1}]}, "content"),
        ("/tokenize", {"content": "a", "add_special": "yes"}, "add_special"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
        ("/tokenize", [], ""),
        ("/detokenize", {"tokens": [99999]}, "token id"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": 5}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": "x"}, "messages"),
        ("/apply-template", {"messages": [{"content": "x"}]}, "role"),
        (
            "/apply-template",
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"timeout_s": 9},
            },
            "timeout_s",
        ),
    ],
)
def test_what_is_wrong(http: httpx.Client, route: str, body: Any, phrase: str) -> None:
    """400 in llama-server's shape, naming the field."""
    answer = http.post(route, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert phrase in error["message"]


def test_a_lone_surrogate_is_refused(http: httpx.Client) -> None:
    """A text that is no Unicode has no tokens."""
    answer = http.post(
        "/tokenize",
        content=b'{"content": "\\ud800"}',
        headers={"Content-Type": "application/json"},
    )

    assert answer.status_code == 400


def test_a_chat_as_a_prompt(http: httpx.Client) -> None:
    """The template's text, with the answer begun; further fields of chats are allowed."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "top_k": 3}
    answer = http.post("/apply-template", json=body)

    assert answer.json() == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    closed = http.post("/apply-template", json={**body, "add_generation_prompt": False})
    assert closed.json() == {"prompt": "<|im_start|>user\nhi<|im_end|>\n"}


def test_the_prompt_gives_the_chats_answer(http: httpx.Client) -> None:
    """/completion on it says what /v1/chat/completions says."""
    messages = [{"role": "user", "content": "hello the world"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    own = {"temperature": 0, "max_tokens": 8}
    chat = http.post("/v1/chat/completions", json={"messages": messages, **own}).json()
    completion = http.post("/completion", json={"prompt": prompt, **own}).json()
    counted = http.post("/v1/chat/completions/input_tokens", json={"messages": messages}).json()

    assert completion["content"] == chat["choices"][0]["message"]["content"]
    assert completion["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    n_prompt = chat["usage"]["prompt_tokens"]
    assert counted == {"input_tokens": n_prompt, "object": "response.input_tokens"}


def test_vllms_fields_of_tokenize(http: httpx.Client, served: Served) -> None:
    """A prompt by its name was nothing: an empty list, and status 200."""
    vocab = served.engine.model.vocab
    body = {"model": "base", "prompt": "hello world"}
    answer = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
    tokens = vocab.tokenize("hello world", add_special=True, parse_special=True)

    assert answer == {
        "count": len(tokens),
        "max_model_len": served.engine.config.sequence_limit,
        "tokens": tokens,
        "token_strs": [vocab.piece(token).decode("utf-8", "replace") for token in tokens],
    }
    bare = http.post("/tokenize", json={**body, "add_special_tokens": False}).json()
    assert bare["tokens"] == vocab.tokenize("hello world", add_special=False, parse_special=True)
    assert bare["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json() == {
        **bare, "count": 0, "tokens": []
    }  # fmt: skip
    back = http.post("/detokenize", json={"model": "base", "tokens": bare["tokens"]}).json()
    assert back["prompt"] == back["content"] == vocab.detokenize(bare["tokens"])


def test_vllms_tokenize_of_a_chat(http: httpx.Client) -> None:
    """The tokens that the chat's prompt has."""
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    answer = http.post("/tokenize", json=chat).json()
    asked = {**chat, "max_tokens": 1, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=asked).json()

    assert answer["tokens"] == whole["prompt_token_ids"]
    assert answer["count"] == len(answer["tokens"])
    both = http.post("/tokenize", json={**chat, "prompt": "a"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "user", "content": "hello"}], "content": "x"}, "content"),
        ({"messages": [{"role": "user", "content": "hello"}], "content": ["x", 5]}, "content"),
        ({"messages": [{"role": "user", "content": "hello"}], "prompt": ""}, "prompt"),
        ({"content": "x", "prompt": "a"}, "prompt"),
    ],
)
def test_content_beside_a_chat_was_dropped(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    """One text a request: which was meant nobody knows."""
    answer = http.post("/tokenize", json=more)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert " and ".join(sorted(more, key=["messages", "content", "prompt"].index)) in answer.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_an_unknown_model_had_tokens(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    """404, as of a request for an answer; an adapter's name is one."""
    answer = http.post(route, json={**body, "model": "nope"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert http.post(route, json={**body, "model": "alpha"}).status_code == 200
