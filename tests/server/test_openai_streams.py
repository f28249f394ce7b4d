"""What a stream tells of the prompt: the same as the whole answer, in its first chunk."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.engine.request import Event
from loragraph.server.runs import Run

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}]}
TEXT: dict[str, Any] = {"prompt": ["hello the world", "a b"]}
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


def chunks_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def assert_alike(got: Any, expected: Any) -> None:
    """The same but for what other rows in a step change in a number."""
    if isinstance(expected, float):
        assert got == pytest.approx(expected, abs=1e-3)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(got[key], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("model", ["base", "alpha"])
def test_prompt_logprobs_in_a_chat(http: httpx.Client, n: int, model: str) -> None:
    """They stand in the first chunk alone, which also has the role."""
    body = {**CHAT, **OPTIONS, "n": n, "model": model, "prompt_logprobs": 2}
    whole = http.post("/v1/chat/completions", json=body).json()

    chunks = chunks_of(http, "/v1/chat/completions", body)

    assert_alike(chunks[0]["prompt_logprobs"], whole["prompt_logprobs"])
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])
    assert whole["prompt_logprobs"][0] is None
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(entry["delta"].get("content", "") for entry in own)
        assert text == choice["message"]["content"]


def test_prompt_logprobs_of_completions(http: httpx.Client) -> None:
    """In the first chunk of each choice, of its own prompt."""
    body = {**TEXT, **OPTIONS, "n": 2, "prompt_logprobs": 0}
    whole = http.post("/v1/completions", json=body).json()

    chunks = chunks_of(http, "/v1/completions", body)

    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert_alike(own[0]["prompt_logprobs"], choice["prompt_logprobs"])
        assert all("prompt_logprobs" not in entry for entry in own[1:])
        assert "".join(entry["text"] for entry in own) == choice["text"]
    lengths = {len(choice["prompt_logprobs"]) for choice in whole["choices"]}
    assert len(lengths) == 2


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo(http: httpx.Client, logprobs: int | None, max_tokens: int) -> None:
    """The prompt's text comes first, with its log-probabilities where they are asked for."""
    body = {**TEXT, **OPTIONS, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    whole = http.post("/v1/completions", json=body).json()

    chunks = chunks_of(http, "/v1/completions", body)

    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(entry["text"] for entry in own) == choice["text"]
        assert own[0]["text"] == TEXT["prompt"][choice["index"]]
        for name in choice["logprobs"] or ():
            parts = [entry["logprobs"][name] for entry in own if entry["logprobs"]]
            assert_alike([value for part in parts for value in part], choice["logprobs"][name])


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_token_ids(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Those of the prompt in the first chunk, each token's in its own."""
    body = {**body, **OPTIONS, "return_token_ids": True}
    whole = http.post(path, json=body).json()

    chunks = chunks_of(http, path, body)

    for choice in whole["choices"]:
        own = [c for c in chunks if c["choices"][0]["index"] == choice["index"]]
        entries = [chunk["choices"][0] for chunk in own]
        ids = [token for entry in entries for token in entry.get("token_ids", [])]
        assert ids == choice["token_ids"]
        expected = whole if "messages" in body else choice
        first = own[0] if "messages" in body else entries[0]
        assert first["prompt_token_ids"] == expected["prompt_token_ids"]


@pytest.mark.parametrize("n", [1, 2])
def test_each_of_several_prompts_tells_what_made_it(http: httpx.Client, n: int) -> None:
    """Adapters and timings are in the last chunk of each prompt, and nowhere else."""
    body = {"prompt": ["one two", "three"], "adapters": ["beta"], **OPTIONS, "n": n}

    chunks = chunks_of(http, "/v1/completions", body)

    told = [c["choices"][0] for c in chunks if "adapters" in c["choices"][0]]
    assert sorted(entry["index"] // n for entry in told) == [0, 1]
    for entry in told:
        assert entry["finish_reason"] is not None
        assert [use["name"] for use in entry["adapters"]] == ["beta"]
        assert entry["timings"]["prompt_n"] + entry["timings"]["cache_n"] > 0
        later = chunks[[c["choices"][0] for c in chunks].index(entry) + 1 :]
        assert all(c["choices"][0]["index"] // n != entry["index"] // n for c in later)
    assert not any("adapters" in chunk for chunk in chunks)


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs have their results before the first of their events is read, one by one."""
    events = Run.events

    async def late(run: Run) -> AsyncGenerator[list[Event], None]:
        for batch in [batch async for batch in events(run)]:
            for event in batch:
                yield [event]

    monkeypatch.setattr(Run, "events", late)


def unlike_lengths(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """A body of whose first prompt's two choices the first has fewer tokens than the second."""
    form = {"grammar": 'root ::= "a" | "bcdefghijkl"', "temperature": 5, "max_tokens": 40}
    for seed in range(100):
        body = {**fields, **form, "n": 2, "seed": seed, "return_token_ids": True}
        choices = http.post(path, json=body).json()["choices"]
        if len(choices[0]["token_ids"]) < len(choices[1]["token_ids"]):
            return body
    raise AssertionError("all choices have one length")


@pytest.mark.usefixtures("slow_reading")
@pytest.mark.parametrize("prompt", [["one two", "three"], ["one two"]])
def test_the_first_choice_to_end_told_adapters_and_the_last_one_again(
    http: httpx.Client, prompt: list[str]
) -> None:
    """Of choices of unlike length the last to end tells, though the result was there before."""
    body = unlike_lengths(http, "/v1/completions", prompt=prompt, adapters=["beta"])

    chunks = chunks_of(http, "/v1/completions", body)

    for number in range(len(prompt)):
        own = [c for c in chunks if c["choices"][0]["index"] // 2 == number]
        *before, last = own
        ends = [c["choices"][0]["finish_reason"] for c in own]
        assert [reason is not None for reason in ends].count(True) == 2
        assert ends[-1] is not None
        assert "adapters" in (last["choices"][0] if len(prompt) > 1 else last)
        assert not any("adapters" in c or "adapters" in c["choices"][0] for c in before)
    first = [c["choices"][0] for c in chunks if c["choices"][0]["index"] < 2]
    [end] = [at for at, entry in enumerate(first) if entry["index"] == 0 and entry["finish_reason"]]
    assert end < len(first) - 2  # not kept until the other's end


@pytest.mark.usefixtures("slow_reading")
def test_last_words_came_before_the_last_text(http: httpx.Client) -> None:
    """/completion of several prompts: nothing of a choice follows its last chunk."""
    body = {"prompt": ["one two", "three"], "n_predict": 6, "ignore_eos": True, "n_cmpl": 2}
    lines = http.post("/completion", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]

    for index in range(4):
        stops = [chunk["stop"] for chunk in chunks if chunk["index"] == index]
        assert stops == [False] * 6 + [True]
