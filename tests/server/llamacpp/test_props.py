"""GET and POST /props, GET /slots, /health: what the server is and does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from tests.server.llamacpp.test_completion import SETTINGS
from tests.server.serving import Served, listening, serving, write_files
from tests.tiny import TinyLlama

PROPS = {
    *("default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path"),
    *("modalities", "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics"),
    *("ui", "ui_settings", "chat_template", "chat_template_caps", "bos_token", "eos_token"),
    *("build_info", "is_sleeping", "cors_proxy_enabled"),
}
SLOT = {"id", "n_ctx", "speculative", "is_processing", "id_task", "params", "next_token"}
COUNTS = {"n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache"}


def test_props_have_llama_servers_keys(http: httpx.Client, served: Served) -> None:
    """The defaults, the template and the special tokens of the base."""
    props = http.get("/props").json()

    assert props.keys() >= PROPS
    assert props["default_generation_settings"]["params"].keys() >= SETTINGS
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["total_slots"] == 8
    assert props["model_path"] == "base.gguf"
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert props["chat_template"] == served.engine.model.vocab.chat_template()
    assert props["modalities"]["vision"] is False


def test_props_can_be_written_only_where_allowed(http: httpx.Client, tmp_path: Path) -> None:
    """501 in llama-server's words without --props; {"success": true} with it."""
    refused = http.post("/props", json={})
    write_files(tmp_path)
    with serving(tmp_path, ServerConfig(with_props=True)) as served, served.client() as other:
        allowed = other.post("/props", json={})

    assert refused.status_code == 501
    assert "Start it with `--props`" in refused.json()["error"]["message"]
    assert allowed.json() == {"success": True}


def test_idle_slots(http: httpx.Client) -> None:
    """One a seat, none at work."""
    slots = http.get("/slots").json()

    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)
    assert http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_a_busy_slot(http: httpx.Client, served: Served) -> None:
    """What runs there: parameters, adapters, tokens so far; its number is the stream's id_slot."""
    body = {
        "prompt": "hello world",
        "n_predict": 900,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "lora": [{"id": 1, "scale": 0.5}],
    }
    with http.stream("POST", "/completion", json=body) as answer, served.client() as other:
        lines = answer.iter_lines()
        line = next(lines)
        busy = [slot for slot in other.get("/slots").json() if slot["is_processing"]]

    (slot,) = busy
    assert slot.keys() >= SLOT | COUNTS
    assert f'"id_slot":{slot["id"]}' in line
    assert slot["params"]["lora"] == [{"name": "beta", "scale": 0.5}]
    assert slot["params"]["n_predict"] == 900
    assert slot["n_prompt_tokens"] == 10
    (next_token,) = slot["next_token"]
    assert next_token["n_decoded"] >= 1
    assert next_token["n_decoded"] + next_token["n_remain"] == 900


def test_no_slot_left(tmp_path: Path) -> None:
    """503 with ?fail_on_no_slot=1 while all are at work."""
    write_files(tmp_path)
    body = {"prompt": "a", "n_predict": 900, "ignore_eos": True, "stream": True}
    with (
        serving(tmp_path, max_sequences=1) as served,
        served.client() as http,
        served.client() as other,
        http.stream("POST", "/completion", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        found = other.get("/slots?fail_on_no_slot=1")

    assert found.status_code == 503
    assert found.json()["error"]["type"] == "unavailable_error"


def test_slots_can_be_switched_off(tmp_path: Path) -> None:
    """501 with --no-slots."""
    write_files(tmp_path)
    with serving(tmp_path, ServerConfig(with_slots=False)) as served, served.client() as http:
        answer = http.get("/slots")

    assert answer.status_code == 501
    assert "Start it with `--slots`" in answer.json()["error"]["message"]


def test_health_while_loading() -> None:
    """503 "Loading model" on every route but the page's, and it needs no key."""
    app = create_app(None, ServerConfig(api_keys=("k",), with_metrics=True))
    with listening(app) as (url, _), httpx.Client(base_url=url) as http:
        for path in ("/health", "/v1/health"):
            answer = http.get(path)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert (error["type"], error["message"]) == ("unavailable_error", "Loading model")
        key = {"Authorization": "Bearer k"}
        for path in ("/props", "/slots", "/lora-adapters", "/v1/models"):
            assert http.get(path, headers=key).status_code == 503
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (
            ("/completion", {"prompt": "a"}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
            ("/tokenize", {"content": "a"}),
            ("/apply-template", chat),
            ("/v1/chat/completions", chat),
        ):
            assert http.post(path, json=body, headers=key).status_code == 503
        assert http.get("/metrics", headers=key).status_code == 200


def test_health_once_ready(http: httpx.Client) -> None:
    """llama-server's very words."""
    for path in ("/health", "/v1/health"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_slot_is_free_again(http: httpx.Client) -> None:
    """After its request, whichever way that ended."""
    http.post("/completion", json={"prompt": "a", "n_predict": 2})
    http.post("/completion", json={"prompt": "a" * 5000})
    deadline = time.monotonic() + 5
    while any(slot["is_processing"] for slot in http.get("/slots").json()):
        assert time.monotonic() < deadline


def test_props_name_the_files_types_and_what_the_template_reads(
    http: httpx.Client, tmp_path: Path
) -> None:
    """`model_ftype` in llama.cpp's words; "" where the file does not say."""
    template = "{% for m in messages %}{{ m.role }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    extra: Any = {"general.file_type": np.uint32(15), "tokenizer.chat_template": template}
    write_files(tmp_path, TinyLlama(extra=extra))
    with serving(tmp_path) as served, served.client() as other:
        props, models = other.get("/props").json(), other.get("/v1/models").json()

    assert props["model_ftype"] == models["data"][0]["meta"]["ftype"] == "Q4_K - Medium"
    caps = props["chat_template_caps"]
    assert caps["supports_tools"]
    assert caps["supports_tool_calls"]
    plain = http.get("/props").json()
    assert plain["chat_template_caps"].keys() == caps.keys()
    assert not plain["chat_template_caps"]["supports_tools"]
    assert plain["model_ftype"] in ("", "all F32", "F16")


def test_models_have_llama_servers_shape_too(http: httpx.Client, served: Served) -> None:
    """`models` beside OpenAI's `data`, and `meta` of the base."""
    answer = http.get("/v1/models").json()
    names = [entry["id"] for entry in answer["data"]]
    meta = answer["data"][0]["meta"]
    model = served.engine.model

    assert [entry["name"] for entry in answer["models"]] == names
    assert all(entry["capabilities"] == ["completion"] for entry in answer["models"])
    assert all(entry["details"]["format"] == "gguf" for entry in answer["models"])
    assert meta.keys() == {
        *("vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype")
    }
    assert meta["vocab_type"] == 1  # SentencePiece
    assert meta["n_params"] == sum(t.n_elements for t in model.weights.files.tensors.values())
    assert model.hparams.n_vocab * model.hparams.n_embd < meta["n_params"]
    assert 0 < meta["size"] < (served.folder / "base.gguf").stat().st_size
