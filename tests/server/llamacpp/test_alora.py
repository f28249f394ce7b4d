"""An aLoRA over HTTP: active from the last occurrence of its invocation on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyAdapter, TinyLlama

X, Y = 301, 302


def post(http: httpx.Client, prompt: Any, **fields: Any) -> Any:
    """A good answer of /completion."""
    body = {"prompt": prompt, "temperature": 0, "n_predict": 12, "ignore_eos": True, **fields}
    answer = http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(served: Served, adapters: Mapping[str, float], prompt: list[int]) -> str:
    """The engine's own answer."""
    result = served.engine.generate(
        prompt, adapters=adapters, temperature=0, max_tokens=12, ignore_eos=True
    )
    return result.text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A base with an aLoRA and a plain adapter."""
    folder = tmp_path_factory.mktemp("alora")
    model: TinyLlama = write_files(folder)
    alora = TinyAdapter(seed=9, invocation_tokens=[X, Y])
    alora.write(folder / "adapters" / "alora.gguf", model)
    paths = {name: folder / "adapters" / f"{name}.gguf" for name in ("alora", "alpha")}
    with serving(folder, adapters=paths) as one:
        yield one


def test_the_list_shows_its_invocation(http: httpx.Client, served: Served) -> None:
    """alora_invocation_string and alora_invocation_tokens, for aLoRAs alone."""
    alora, alpha = (
        next(entry for entry in http.get("/lora-adapters").json() if entry["name"] == name)
        for name in ("alora", "alpha")
    )

    vocab = served.engine.model.vocab
    assert alora["alora_invocation_tokens"] == [X, Y]
    assert alora["alora_invocation_string"].encode() == vocab.piece(X) + vocab.piece(Y)
    assert "alora_invocation_tokens" not in alpha


@pytest.mark.parametrize(
    ("tail", "active_from"),
    [([X, Y], 10), ([X, Y, Y], 10), ([X, X, Y], 11), ([], None)],
)
def test_overlaps_and_absence(
    http: httpx.Client, served: Served, tail: list[int], active_from: int | None
) -> None:
    """x,y,y and x,x,y are found, which llama-server misses (4.5); absent is said to be off."""
    prompt = [*range(100, 110), *tail]
    answer = post(http, prompt, lora=[{"name": "alora", "scale": 1}])

    (use,) = answer["adapters"]
    assert use["active_from"] == active_from
    assert use["active"] is (active_from is not None)
    assert answer["content"] == text(served, {"alora": 1}, prompt)


def test_the_prefix_before_it_is_the_bases(http: httpx.Client) -> None:
    """Its tokens come from a base request's cache, the adapter's own never do (4.5)."""
    prompt = [*range(150, 190), X, Y]
    post(http, prompt)
    answer = post(http, prompt, lora=[{"name": "alora", "scale": 1}])
    at_once = post(http, [X, Y, 5])
    adapted = post(http, [X, Y, 5], lora=[{"name": "alora", "scale": 1}])

    assert answer["timings"]["cache_n"] == 40
    assert adapted["timings"]["cache_n"] == 0
    assert adapted["content"] != at_once["content"]
