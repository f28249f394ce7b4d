"""llama-server's post_sampling_probs, in its own shape on every route."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

PATHS = ("/completion", "/v1/completions", "/v1/chat/completions")
OPTIONS: dict[str, Any] = {"seed": 3, "top_k": 4, "max_tokens": 5, "ignore_eos": True}


def body_of(path: str, n: int, **fields: Any) -> dict[str, Any]:
    """A request for the probabilities of `n` candidates."""
    body = {**OPTIONS, "post_sampling_probs": True, **fields}
    if "chat" in path:
        message = {"role": "user", "content": "hello"}
        return {**body, "messages": [message], "logprobs": True, "top_logprobs": n}
    return {**body, "prompt": "hello", "n_probs": n}


def entries_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of an answer, or of a chunk of one."""
    if "choices" not in answer:
        return list(answer.get("completion_probabilities", []))
    return [
        entry
        for choice in answer["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_entries_have_probabilities(http: httpx.Client, path: str, stream: bool) -> None:
    """`prob` and `top_probs` in place of logarithms, which add up to 1 where all are told."""
    answer = http.post(path, json=body_of(path, 10, stream=stream))

    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        found = [entry for chunk in chunks for entry in entries_of(chunk)]
    else:
        found = entries_of(answer.json())
    assert len(found) == 5
    for entry in found:
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        assert 0 < entry["prob"] <= 1
        by_id = {top["id"]: top["prob"] for top in entry["top_probs"]}
        assert by_id[entry["id"]] == entry["prob"]
        assert 1 <= len(by_id) <= 4
        assert sum(by_id.values()) == pytest.approx(1)


def test_settings_tell_of_it(http: httpx.Client) -> None:
    """As llama-server's do."""
    body = body_of("/completion", 2, min_keep=3)

    settings = http.post("/completion", json=body).json()["generation_settings"]

    assert settings["post_sampling_probs"] is True
    assert settings["min_keep"] == 3


@pytest.mark.parametrize("fields", [{"best_of": 3}, {"echo": True}])
def test_what_needs_the_models_own(http: httpx.Client, fields: dict[str, Any]) -> None:
    """A ranking and a prompt have no draw to tell of."""
    answer = http.post("/v1/completions", json=body_of("/v1/completions", 2, **fields))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "post_sampling_probs"
