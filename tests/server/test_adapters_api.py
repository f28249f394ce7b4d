"""Adapters loaded, replaced, unloaded and pinned over HTTP, while requests run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyAdapter, TinyLlama

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
UNLOADED = {"json": {"lora_name": "x"}}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server with a folder of adapters, none of them registered by a flag."""
    model = write_files(tmp_path)
    (tmp_path / "adapters" / "sub").mkdir()
    TinyAdapter(seed=9).write(tmp_path / "adapters" / "sub" / "delta.gguf", model)
    TinyAdapter(seed=9).write(tmp_path / "outside.gguf", model)
    TinyAdapter().write(tmp_path / "adapters" / "small.gguf", TinyLlama(n_embd=32))
    (tmp_path / "adapters" / "junk.gguf").write_bytes(b"no GGUF")
    (tmp_path / "adapters" / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (tmp_path / "adapters" / "out").symlink_to(tmp_path)
    config = ServerConfig(adapter_dir=tmp_path / "adapters")
    with serving(tmp_path, config, {}, adapter_dir=tmp_path / "adapters", max_adapters=3) as one:
        yield one


def text(http: httpx.Client, model: str, n: int = 8) -> str:
    """A greedy answer."""
    body = {"prompt": "hello", "model": model, "max_tokens": n, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def row(http: httpx.Client, name: str) -> dict[str, Any]:
    """An adapter's entry among the models."""
    found: dict[str, Any] = http.get(f"/v1/models/{name}").json()["adapter"]
    return found


def test_load_and_unload(served: Served, http: httpx.Client) -> None:
    """A file of the folder gets a name of its own; unloaded, the name means nothing."""
    loaded = http.post(LOAD, json={"lora_name": "mine", "lora_path": "sub/delta.gguf"})
    by_name = text(http, "mine")
    direct = served.engine.generate("hello", adapters={"mine": 1}, temperature=0, max_tokens=8).text
    unloaded = http.post(UNLOAD, json={"lora_name": "mine"})
    after = http.post("/v1/completions", json={"prompt": "hello", "model": "mine"})
    again = http.post(UNLOAD, json={"lora_name": "mine"})

    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'mine' added successfully.",
    )
    assert by_name == direct
    assert unloaded.status_code == 200
    assert (after.status_code, again.status_code) == (404, 404)


def test_an_absolute_path_into_the_folder(served: Served, http: httpx.Client) -> None:
    """Absolute paths are taken where they lead into the folder."""
    path = served.folder / "adapters" / "alpha.gguf"

    assert http.post(LOAD, json={"lora_name": "x", "lora_path": str(path)}).status_code == 200
    assert text(http, "x") == text(http, "alpha")


@pytest.mark.parametrize(
    "path",
    [
        "../outside.gguf",
        "sub/../../outside.gguf",
        "link.gguf",
        "out/outside.gguf",
        "/etc/passwd",
        "/etc",
        ".",
        "",
        "missing.gguf",
        "junk.gguf",
        "small.gguf",
        "a\0b",
        "x" * 4000,
        "/" * 100,
    ],
)
def test_other_paths_are_refused(served: Served, http: httpx.Client, path: str) -> None:
    """Nothing outside of the folder, nothing that is no adapter, and no half loaded name; where
    the server keeps its files is not told.
    """
    answer = http.post(LOAD, json={"lora_name": "x", "lora_path": path})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert str(served.folder) not in answer.text
    assert http.get("/v1/models/x").status_code == 404


def test_without_a_folder_nothing_is_loaded(tmp_path: Path) -> None:
    """A server without --lora-dir loads no paths."""
    write_files(tmp_path)
    with serving(tmp_path) as one, one.client() as client:
        answer = client.post(LOAD, json={"lora_name": "x", "lora_path": "adapters/alpha.gguf"})

    assert answer.status_code == 400
    assert "--lora-dir" in answer.text


@pytest.mark.parametrize("name", ["base", "base:x", "a/b", ".x", " x", "", "x" * 200, "a\nb"])
def test_names_that_cannot_be(http: httpx.Client, name: str) -> None:
    """The base's name, and what is no name, are refused."""
    answer = http.post(LOAD, json={"lora_name": name, "lora_path": "alpha.gguf"})

    assert answer.status_code == 400


def test_a_loaded_name_is_replaced_only_when_asked(http: httpx.Client) -> None:
    """load_inplace makes another generation at once; without it the name stays as it is."""
    first = http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    alpha, generation = text(http, "x"), row(http, "x")["generation"]
    refused = http.post(LOAD, json={"lora_name": "x", "lora_path": "beta.gguf"})
    same = text(http, "x")
    replaced = http.post(
        LOAD, json={"lora_name": "x", "lora_path": "beta.gguf", "load_inplace": True}
    )

    assert (first.status_code, refused.status_code, replaced.status_code) == (200, 400, 200)
    assert "already been loaded" in refused.text
    assert same == alpha
    assert text(http, "x") == text(http, "beta") != alpha
    assert row(http, "x")["generation"] > generation


def test_a_bad_replacement_changes_nothing(http: httpx.Client) -> None:
    """The name goes on to mean what it meant."""
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    before, generation = text(http, "x"), row(http, "x")["generation"]

    for path in ("junk.gguf", "small.gguf", "missing.gguf"):
        body = {"lora_name": "x", "lora_path": path, "load_inplace": True}
        assert http.post(LOAD, json=body).status_code == 400

    assert text(http, "x") == before
    assert row(http, "x")["generation"] == generation


def test_ids_are_never_used_twice(http: httpx.Client) -> None:
    """A name that is gone takes its id along; back again, it gets another."""
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    first = row(http, "x")["id"]
    http.post(UNLOAD, json={"lora_name": "x"})
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})

    body = {"prompt": "a", "max_tokens": 1, "lora": [{"id": first, "scale": 1}]}
    assert row(http, "x")["id"] > first
    assert http.post("/v1/completions", json=body).status_code == 400


def test_pins(http: httpx.Client) -> None:
    """A pinned adapter stays in memory while others come and go; too many pins are a 503."""
    for name in ("alpha", "beta"):
        assert http.post("/v1/pin_lora_adapter", json={"lora_name": name}).status_code == 200
    for name in ("gamma", "link", "gamma"):
        http.post("/v1/completions", json={"prompt": "a", "model": name, "max_tokens": 1})
    http.post(LOAD, json={"lora_name": "x", "lora_path": "sub/delta.gguf", "pinned": True})

    assert [row(http, name)["resident"] for name in ("alpha", "beta", "x")] == [True] * 3
    full = http.post("/v1/pin_lora_adapter", json={"lora_name": "gamma"})
    assert full.status_code == 503
    assert http.post("/v1/unpin_lora_adapter", json={"lora_name": "beta"}).status_code == 200
    assert http.post("/v1/pin_lora_adapter", json={"lora_name": "gamma"}).status_code == 200
    assert http.post("/v1/pin_lora_adapter", json={"lora_name": "nope"}).status_code == 404


def test_a_replacement_without_room_keeps_the_generation_and_its_options(
    served: Served, http: httpx.Client
) -> None:
    """It was registered anew from its path, unpinned and without the options of its load."""
    engine, folder = served.engine, served.folder / "adapters"
    engine.load_adapter("x", folder / "alpha.gguf", ignore_norm=True)
    for name in ("alpha", "beta", "gamma"):
        engine.pin(name)
    old = engine.resolve("x")
    body = {"lora_name": "x", "lora_path": "beta.gguf", "load_inplace": True}
    assert http.post(LOAD, json=body).status_code == 503
    assert engine.resolve("x") is old
    assert not old.retired


def test_a_mix_that_meets_an_unload_holds_no_unknown_name(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name left between its look-up and the mix: every request without adapters was a 404."""
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    number = row(http, "x")["id"]
    resolve = served.engine.registry.resolve
    threads: list[threading.Thread] = []

    def late(name: str) -> Any:
        found = resolve(name)
        if not threads:
            unload = threading.Thread(target=http.post, args=(UNLOAD,), kwargs=UNLOADED)
            threads.append(unload)
            unload.start()
            unload.join(0.5)
        return found

    monkeypatch.setattr(served.engine.registry, "resolve", late)
    http.post("/lora-adapters", json=[{"id": number, "scale": 1.0}])
    threads[0].join(10)
    assert "x" not in served.state.default_mix
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200


def test_sglang_answers(http: httpx.Client) -> None:
    """SGLang's routes answer with all that is loaded."""
    loaded = http.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": "alpha.gguf"})
    unloaded = http.post("/unload_lora_adapter", json={"lora_name": "x"})

    assert loaded.json()["success"] is True
    assert loaded.json()["loaded_adapters"] == {"x": "alpha.gguf"}
    assert unloaded.json()["loaded_adapters"] == {}


def test_swaps_under_traffic(served: Served, http: httpx.Client) -> None:
    """While a name is loaded, replaced and unloaded again and again, every answer is of one of the
    adapters that the name meant, or a 404; others are not disturbed.
    """
    right = {text(http, "alpha", 12), text(http, "beta", 12)}
    base = text(http, "base", 12)
    stop = threading.Event()
    wrong: list[Any] = []
    counts = {200: 0, 404: 0}

    def ask() -> None:
        body = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
        with served.client() as client:
            while not stop.is_set():
                named = client.post("/v1/completions", json={**body, "model": "x"})
                plain = client.post("/v1/completions", json=body)
                counts[named.status_code] = counts.get(named.status_code, 0) + 1
                if named.status_code == 200 and named.json()["choices"][0]["text"] not in right:
                    wrong.append(named.text)
                if plain.json()["choices"][0]["text"] != base:
                    wrong.append(plain.text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for i in range(12):
            path = ("alpha.gguf", "beta.gguf")[i % 2]
            body = {"lora_name": "x", "lora_path": path, "load_inplace": i % 4 != 0}
            assert http.post(LOAD, json=body).status_code == 200
            if i % 4 == 3:
                assert http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert wrong == []
    assert set(counts) == {200, 404}
    assert counts[200] > 0


def test_one_change_of_a_name_at_a_time(served: Served, http: httpx.Client) -> None:
    """A second change of a name meanwhile is a 409."""
    served.state.extra["changing"] = {"x"}

    answer = http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})

    assert answer.status_code == 409
    served.state.extra["changing"].clear()
    assert http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"}).status_code == 200


def test_a_file_that_changed_on_disk(served: Served, http: httpx.Client) -> None:
    """A file replaced by another changes nothing that is in memory; loaded anew it is another."""
    model = write_files(served.folder)
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    before = text(http, "x")
    new = served.folder / "new.gguf"
    TinyAdapter(seed=77).write(new, model)
    os.replace(new, served.folder / "adapters" / "alpha.gguf")

    assert text(http, "x") == before
    body = {"lora_name": "x", "lora_path": "alpha.gguf", "load_inplace": True}
    assert http.post(LOAD, json=body).status_code == 200
    assert text(http, "x") != before


def test_prompts_of_one_request_use_one_generation(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many prompts those that are submitted after a swap use what the name meant before, too."""
    http.post(LOAD, json={"lora_name": "x", "lora_path": "alpha.gguf"})
    before = row(http, "x")["generation"]
    submit = served.engine.arun
    swapped: list[bool] = []

    async def swap_then_submit(request: Any) -> Any:
        if not swapped:
            swapped.append(True)
            beta = served.folder / "adapters" / "beta.gguf"
            await asyncio.to_thread(served.engine.load_adapter, "x", beta)
        return await submit(request)

    monkeypatch.setattr(served.engine, "arun", swap_then_submit)
    body = {"prompt": ["hello"] * 3, "model": "x", "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=body)

    assert answer.status_code == 200, answer.text
    used = {one["adapters"][0]["generation"] for one in answer.json()["choices"]}
    assert used == {before} != {row(http, "x")["generation"]}
