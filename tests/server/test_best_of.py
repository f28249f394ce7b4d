"""best_of on /v1/completions: more answers are generated than are given out."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx

ASKED = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "seed": 5, "temperature": 2.0}


def test_the_best_by_mean_log_probability(http: httpx.Client) -> None:
    """The two best of the five that n would give, the best first; all of them are counted."""
    all_five = http.post("/v1/completions", json={**ASKED, "n": 5, "logprobs": 0}).json()
    best = http.post("/v1/completions", json={**ASKED, "n": 2, "best_of": 5, "logprobs": 0}).json()

    def mean(choice: dict[str, Any]) -> float:
        found: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(found) / len(found)

    expected = sorted(all_five["choices"], key=mean, reverse=True)[:2]
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in expected]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == all_five["usage"]["completion_tokens"] == 20


def test_best_of_does_not_tell_what_was_not_asked(http: httpx.Client) -> None:
    """Log-probabilities choose, and are in the answer only where they are asked for."""
    (choice,) = http.post("/v1/completions", json={**ASKED, "best_of": 3}).json()["choices"]

    assert choice["logprobs"] is None
