"""llama.cpp's test_lora.py on a real base: SmolLM2-135M-Instruct and the demo's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from benchmarks.http_client import first_difference
from loragraph.engine.engine import Engine
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from tests.server.llamacpp.leaks import assert_idle
from tests.server.serving import Served, listening
from tests.smollm import smollm_path

ADAPTERS = Path(__file__).parents[3] / "demos" / "adapters"
NAMES = ("json", "pirate", "poem")
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
N_PREDICT = 10
BOUND = 0.1  # of one logit: Q4_1, in batches of other shapes


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The demo, served; skips where the base is missing."""
    base = smollm_path()
    adapters = {name: ADAPTERS / f"{name}.gguf" for name in NAMES}
    with (
        Engine(base, adapters, n_ctx=2048, n_threads=1) as engine,
        listening(create_app(engine, ServerConfig())) as (url, app),
    ):
        yield Served(url, app.state.loragraph, engine, ADAPTERS)


def client_of(served: Served) -> httpx.Client:
    """A patient client: a busy machine takes its time for a real base."""
    return httpx.Client(base_url=served.url, timeout=600)


def prompt_of(http: httpx.Client) -> str:
    """The question as the base's template has it."""
    return str(http.post("/apply-template", json={"messages": QUESTION}).json()["prompt"])


def ask(http: httpx.Client, prompt: str, lora: Any) -> Any:
    """An answer of /completion with its tokens."""
    body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "seed": 42}
    own = {"cache_prompt": False, "return_tokens": True, "lora": lora}
    answer = http.post("/completion", json={**body, **own})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(served: Served, prompt: str, answer: Any, scales: dict[str, float]) -> None:
    """The tokens are those of the request alone, up to the first that is not clearly decided."""
    alone = served.engine.generate(
        prompt, adapters=scales, temperature=0, max_tokens=N_PREDICT, logprobs=2, cache_salt="alone"
    )
    choice = alone.choices[0]
    at = first_difference(answer["tokens"], choice.tokens)
    if at is not None and at < len(choice.logprobs):
        (_, best), (_, second) = choice.logprobs[at].top
        assert best - second <= 2 * BOUND, f"differs at token {at} of {choice.text!r}"


def test_a_global_switch(served: Served) -> None:
    """Each scale of the default mix has its own text: the base's, and the adapter's habit."""
    with client_of(served) as http:
        prompt = prompt_of(http)
        number = {entry["name"]: entry["id"] for entry in http.get("/lora-adapters").json()}
        texts = {}
        for scale in (0.0, 1.0):
            http.post("/lora-adapters", json=[{"id": number["json"], "scale": scale}])
            answer = ask(http, prompt, None)
            check(served, prompt, answer, {"json": scale})
            texts[scale] = answer["content"]
        http.post("/lora-adapters", json=[])

    assert not texts[0.0].lstrip().startswith("{")
    assert texts[1.0].lstrip().startswith("{")
    assert_idle(served)


@pytest.mark.parametrize("name", ["pirate", "poem"])
def test_scales_by_request_in_parallel(served: Served, name: str) -> None:
    """Six at once with the scales of llama.cpp's test: each has the text that it has alone."""
    scales = [0, 0, 0.3, 0.7, 1, 1]
    with client_of(served) as http, ThreadPoolExecutor(6) as pool:
        prompt = prompt_of(http)
        answers = list(
            pool.map(lambda scale: ask(http, prompt, [{"name": name, "scale": scale}]), scales)
        )

    for scale, answer in zip(scales, answers, strict=True):
        check(served, prompt, answer, {name: scale})
    assert answers[0]["content"] != answers[-1]["content"]
    assert_idle(served)


def test_unlike_adapters_in_one_batch(served: Served) -> None:
    """Base, each adapter and a mix of two at once, over /completion and chats alike."""
    mixes: list[dict[str, float]] = [{}, *({name: 1.0} for name in NAMES), {"json": 1, "poem": 0.5}]
    with client_of(served) as http, ThreadPoolExecutor(5) as pool:
        prompt = prompt_of(http)
        lora = [[{"name": name, "scale": s} for name, s in mix.items()] for mix in mixes]
        answers = list(pool.map(lambda one: ask(http, prompt, one), lora))
        chat = {"messages": QUESTION, "temperature": 0, "max_tokens": N_PREDICT, "model": "json"}
        said = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]

    for mix, answer in zip(mixes, answers, strict=True):
        check(served, prompt, answer, mix)
    assert said["content"].lstrip().startswith("{")
    assert_idle(served)
