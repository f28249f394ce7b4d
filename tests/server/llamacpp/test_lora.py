"""Adapters over llama-server's routes: the cases of its test_lora.py, and what it gets wrong."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.engine.engine import Engine
from tests.server.serving import ADAPTERS, Served
from tests.tiny import TinyAdapter, TinyLlama

PROMPT = "look in thy glass"
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 12, "ignore_eos": True, "seed": 42}


@pytest.fixture(autouse=True)
def _default_mix_is_empty(served: Served) -> None:
    """Each test begins with the base as default."""
    served.state.set_default_mix({})


def text(served: Served, adapters: Mapping[str, float] | None, prompt: Any = PROMPT) -> str:
    """The engine's own answer."""
    result = served.engine.generate(
        prompt, adapters=adapters, temperature=0, max_tokens=12, ignore_eos=True
    )
    return result.text


def post(http: httpx.Client, **fields: Any) -> Any:
    """A good answer of /completion."""
    answer = http.post("/completion", json={"prompt": PROMPT, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_has_llama_servers_keys(http: httpx.Client) -> None:
    """id, path, scale, task_name and prompt_prefix of each, in the order of the ids."""
    entries = http.get("/lora-adapters").json()

    assert [entry["id"] for entry in entries] == [0, 1, 2]
    assert [entry["name"] for entry in entries] == list(ADAPTERS)
    for entry in entries:
        assert entry.keys() >= {"id", "path", "scale", "task_name", "prompt_prefix"}
        assert (entry["scale"], entry["path"]) == (0.0, f"{entry['name']}.gguf")


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_global_switch(http: httpx.Client, served: Served, scale: float) -> None:
    """llama.cpp's test_lora: POST sets the scale of requests that say nothing themselves."""
    answer = http.post("/lora-adapters", json=[{"id": 0, "scale": scale}])
    assert (answer.status_code, answer.json()) == (200, {"success": True})

    assert http.get("/lora-adapters").json()[0]["scale"] == scale
    assert post(http)["content"] == text(served, {"alpha": scale})


def test_scales_by_request_in_parallel(http: httpx.Client, served: Served) -> None:
    """llama.cpp's test_lora_per_request: six at once, each its own scale, each its own text."""
    scales = [0, 0, 0.3, 0.7, 1, 1]

    def ask(scale: float) -> str:
        lora = [{"id": 0, "scale": scale}]
        return str(post(http, lora=lora, cache_prompt=False)["content"])

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, scales))

    assert texts == [text(served, {"alpha": scale}) for scale in scales]
    assert len(set(texts)) == 4


def test_the_switch_does_not_reach_requests_that_run(http: httpx.Client, served: Served) -> None:
    """A request keeps the mix of its start."""
    body = {"prompt": PROMPT, **GREEDY, "n_predict": 300, "stream": True}
    with http.stream("POST", "/completion", json=body) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        with served.client() as other:
            other.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
        rest = [first, *lines]

    content = "".join(httpx.Response(200, text=line[6:]).json()["content"] for line in rest if line)
    expected = served.engine.generate(PROMPT, temperature=0, max_tokens=300, ignore_eos=True)
    assert content == expected.text


def test_three_ways_to_say_base(http: httpx.Client, served: Served) -> None:
    """Absent means the default; an empty list and a scale of 0 mean the base (llama.cpp #28674)."""
    http.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
    base, alpha = text(served, {}), text(served, {"alpha": 1})

    assert base != alpha
    assert post(http)["content"] == alpha
    assert post(http, lora=None)["content"] == alpha
    assert post(http, lora=[])["content"] == base
    assert post(http, lora=[{"id": 0, "scale": 0}])["content"] == base
    assert post(http, lora=[{"id": 1, "scale": 0}])["content"] == base


def test_adapters_by_name_and_several_at_once(http: httpx.Client, served: Served) -> None:
    """A name in place of an id; unlisted ones are off; the answer says what made it."""
    lora = [{"name": "beta", "scale": 0.5}, {"id": 2, "scale": -0.25}]
    answer = post(http, lora=lora)

    assert answer["content"] == text(served, {"beta": 0.5, "gamma": -0.25})
    assert answer["generation_settings"]["lora"] == lora
    assert [(use["name"], use["scale"]) for use in answer["adapters"]] == [
        ("beta", 0.5),
        ("gamma", -0.25),
    ]
    assert post(http, model="beta")["content"] == text(served, {"beta": 1})
    assert post(http, model="beta")["model"] == "beta"


@pytest.mark.parametrize("route", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_the_field_on_every_generating_route(
    http: httpx.Client, served: Served, route: str
) -> None:
    """`lora` means the same everywhere."""
    prompt = (
        {"messages": [{"role": "user", "content": "a"}]} if "chat" in route else {"prompt": "a"}
    )
    body = {**prompt, "temperature": 0, "max_tokens": 8, "lora": [{"id": 1, "scale": 1}]}
    answer = http.post(route, json=body)

    assert answer.status_code == 200, answer.text
    assert [use["name"] for use in answer.json()["adapters"]] == ["beta"]


def test_a_cached_prefix_of_another_mix_is_never_used(http: httpx.Client, served: Served) -> None:
    """llama.cpp's stale caches (4.3, 4.7): same prompt, other adapter; then the global switch."""
    prompt = [*range(200, 240)]
    alpha, beta = ([{"id": i, "scale": 1}] for i in (0, 1))

    first = post(http, prompt=prompt, lora=alpha)
    other = post(http, prompt=prompt, lora=beta)
    again = post(http, prompt=prompt, lora=alpha)
    http.post("/lora-adapters", json=[{"id": 1, "scale": 1}])
    switched = post(http, prompt=prompt)

    assert other["timings"]["cache_n"] == 0
    assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
    assert switched["timings"]["cache_n"] == switched["tokens_evaluated"] - 1
    assert first["content"] == again["content"] == text(served, {"alpha": 1}, prompt)
    assert other["content"] == switched["content"] == text(served, {"beta": 1}, prompt)


def test_what_a_switch_leaves_out_gets_scale_0(http: httpx.Client) -> None:
    """As in llama-server; an empty list switches all off."""
    http.post("/lora-adapters", json=[{"id": 0, "scale": 1}, {"name": "gamma", "scale": 2}])
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [1, 0, 2]
    http.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0, 0.5, 0]
    http.post("/lora-adapters", json=[])
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0, 0, 0]


def test_what_get_answered_can_be_posted_back(http: httpx.Client) -> None:
    """As scripts of llama-server do it: read the list, change a scale, send it all."""
    http.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
    entries = http.get("/lora-adapters").json()
    entries[2]["scale"] = 2
    answer = http.post("/lora-adapters", json=entries)

    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0, 0.5, 2]


def test_extra_keys_of_an_entry_mean_nothing(http: httpx.Client, served: Served) -> None:
    """In the request field too."""
    entry = {"id": 0, "scale": 1, "path": "elsewhere.gguf", "task_name": "x", "mine": [1]}

    assert post(http, lora=[entry])["content"] == text(served, {"alpha": 1})


@pytest.mark.parametrize("entry", [{"id": 1}, {"id": 1, "scale": None}])
def test_an_id_without_a_scale_has_scale_0(
    http: httpx.Client, served: Served, entry: dict[str, Any]
) -> None:
    """llama-server's default, in the switch and in a request."""
    http.post("/lora-adapters", json=[{"id": 1, "scale": 1}])
    assert post(http, lora=[entry])["content"] == text(served, {})

    assert http.post("/lora-adapters", json=[entry]).status_code == 200
    assert [one["scale"] for one in http.get("/lora-adapters").json()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("body", "status", "phrase"),
    [
        ({"id": 0, "scale": 1}, 400, "Request body must be an array"),
        ("x", 400, "Request body must be an array"),
        ([1], 400, "must be an array of objects"),
        ([{"id": 77, "scale": 1}], 400, "no adapter has the id 77"),
        ([{"name": "nobody", "scale": 1}], 404, "nobody"),
        ([{"id": 0, "scale": "x"}], 400, "finite scale"),
        ([{"name": "alpha"}], 400, "'scale' is missing"),
        ([{"id": 0, "name": "beta", "scale": 1}], 400, "'id' and 'name' disagree: 0 is 'alpha'"),
        ([{"scale": 1}], 400, "'id' or 'name'"),
        ([{"id": "0", "scale": 1}], 400, "integer id"),
        ([{"id": True, "scale": 1}], 400, "integer id"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 1}], 400, "twice"),
    ],
)
def test_a_wrong_switch_changes_nothing(
    http: httpx.Client, body: Any, status: int, phrase: str
) -> None:
    """The old default stays, and the error has llama-server's shape."""
    http.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
    answer = http.post("/lora-adapters", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert phrase in error["message"]
    assert error.keys() >= {"code", "message", "type"}
    assert [entry["scale"] for entry in http.get("/lora-adapters").json()] == [0, 0.5, 0]


@pytest.mark.parametrize(
    ("lora", "status", "phrase"),
    [
        ("x", 400, "Field 'lora': Error: 'lora' must be an array of objects"),
        (5, 400, "Field 'lora': Error: 'lora' must be an array of objects"),
        ([{"id": 9, "scale": 1}], 400, "no adapter has the id 9"),
        ([{"id": 2**70, "scale": 1}], 400, "no adapter has the id"),
        ([{"name": "nobody", "scale": 1}], 404, "known: alpha, beta, gamma"),
        ([{"name": "alpha", "scale": None}], 400, "finite scale"),
        ([{"id": 0, "scale": 1e39}], 400, "finite scale"),
    ],
)
def test_a_wrong_lora_field(http: httpx.Client, lora: Any, status: int, phrase: str) -> None:
    """Refused before anything is computed."""
    answer = http.post("/completion", json={"prompt": "a", "lora": lora})

    assert answer.status_code == status
    assert phrase in answer.json()["error"]["message"]


def test_swap_under_traffic(served: Served, tmp_path: Path) -> None:
    """Requests that name an adapter while it is registered anew get one of its two texts."""
    new = tmp_path / "new.gguf"
    TinyAdapter(seed=77, rank=5).write(new, TinyLlama())
    old_text = text(served, {"gamma": 1})

    def ask(_i: int) -> str:
        with served.client() as http:
            return str(post(http, lora=[{"name": "gamma", "scale": 1}])["content"])

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(24)]
        served.engine.load_adapter("gamma", new)
        texts = {future.result() for future in asked}
    new_text = text(served, {"gamma": 1})

    assert old_text != new_text
    assert texts <= {old_text, new_text}
    assert isinstance(served.engine, Engine)
