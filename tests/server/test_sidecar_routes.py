"""Sidecars behind a server: their defaults on every generating route, and who may use what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyLlama

POET = """
task_name = "poems"
system_prompt = "be a poet"
prompt_prefix = "poem: "
stop = ["zz"]
scale = 0.5
chat_template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"

[sampling]
temperature = 0
max_tokens = 5
top_k = 3
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """alpha is a poet, beta is for one key alone, gamma's sidecar is wrong."""
    folder = tmp_path_factory.mktemp("sidecars")
    write_files(folder)
    (folder / "adapters" / "alpha.toml").write_text(POET)
    (folder / "adapters" / "beta.toml").write_text('keys = ["for-beta"]')
    (folder / "adapters" / "gamma.toml").write_text("colour = 1")
    config = ServerConfig(api_keys=("for-beta", "other"), admin_keys=("boss",))
    with serving(folder, config) as one:
        yield one


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client with a key that beta's sidecar does not name."""
    with served.client("other") as client:
        yield client


def good(http: httpx.Client, route: str, body: dict[str, Any]) -> Any:
    """A good answer."""
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_defaults_on_completion(http: httpx.Client, served: Served) -> None:
    """Prefix, stop strings, sampling and scale; the request's fields win, one by one."""
    answer = good(http, "/completion", {"prompt": "sea", "model": "alpha"})
    expected = served.engine.generate(
        "poem: sea", adapters={"alpha": 0.5}, temperature=0, max_tokens=5
    )

    assert answer["prompt"] == "<s> poem: sea"
    assert answer["content"] == expected.text
    assert answer["adapters"][0]["scale"] == 0.5
    settings = answer["generation_settings"]
    assert (settings["stop"], settings["n_predict"], settings["top_k"]) == (["zz"], 5, 3)

    body = {"prompt": "sea", "model": "alpha", "n_predict": 2, "stop": ["q"], "temperature": 0.5}
    settings = good(http, "/completion", body)["generation_settings"]
    assert (settings["stop"], settings["n_predict"], settings["top_k"]) == (["q"], 2, 3)
    assert settings["temperature"] == 0.5


def test_defaults_however_the_adapter_is_named(http: httpx.Client) -> None:
    """By `lora` with a scale of its own, by `adapters`, by BASE:NAME."""
    for fields, scale in (
        ({"lora": [{"name": "alpha", "scale": 2}]}, 2),
        ({"lora": [{"id": 0, "scale": 2}]}, 2),
        ({"adapters": ["alpha"]}, 0.5),
        ({"adapters": {"alpha": 3}}, 3),
        ({"model": "base:alpha"}, 0.5),
    ):
        answer = good(http, "/completion", {"prompt": "sea", **fields})
        assert answer["prompt"] == "<s> poem: sea"
        assert answer["adapters"][0]["scale"] == scale


def test_defaults_on_openais_completions(http: httpx.Client) -> None:
    """The same prompt and length, for each prompt of a list; ids stay as they are."""
    own = {"model": "alpha", "echo": True}
    one = good(http, "/v1/completions", {"prompt": "sea", **own})
    several = good(http, "/v1/completions", {"prompt": ["sea", "poem: sky", [5, 6]], **own})

    assert one["choices"][0]["text"].startswith("poem: sea")
    assert one["usage"]["completion_tokens"] <= 5
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[0].startswith("poem: sea")
    assert texts[1].startswith("poem: sky")
    assert not texts[2].startswith("poem: ")


def test_defaults_on_chats(http: httpx.Client) -> None:
    """System prompt, prefix and template of the adapter; none of them for the base."""
    messages = [{"role": "user", "content": "sea"}]
    rendered = good(http, "/apply-template", {"messages": messages, "model": "alpha"})
    base = good(http, "/apply-template", {"messages": messages})
    chat = good(http, "/v1/chat/completions", {"messages": messages, "model": "alpha"})
    prompt = {"prompt": rendered["prompt"], "model": "alpha", "adapter_defaults": False}
    plain = good(http, "/completion", {**prompt, "temperature": 0, "n_predict": 5})

    assert rendered["prompt"] == "[system:be a poet][user:poem: sea]"
    assert base["prompt"].startswith("<|im_start|>user\nsea")
    assert chat["usage"]["prompt_tokens"] == plain["tokens_evaluated"]
    assert chat["choices"][0]["message"]["content"] == plain["content"]
    own = {"role": "system", "content": "mine"}
    rendered = good(http, "/apply-template", {"messages": [own, *messages], "model": "alpha"})
    assert rendered["prompt"] == "[system:mine][user:poem: sea]"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completion", {"prompt": "sea"}),
        ("/v1/completions", {"prompt": "sea", "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sea"}]}),
    ],
)
def test_defaults_can_be_left_out(
    http: httpx.Client, served: Served, route: str, body: dict[str, Any]
) -> None:
    """`adapter_defaults` false: the adapter alone."""
    given = {"adapter_defaults": False, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = good(http, route, {**body, **given, "model": "alpha"})

    n = answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"]
    assert n == 9
    assert "poem" not in str(answer)


def test_the_default_mix_brings_its_defaults(http: httpx.Client, served: Served) -> None:
    """Whoever names nothing uses the default mix, and what comes with it."""
    served.state.set_default_mix({"alpha": 1.0})
    try:
        answer = good(http, "/completion", {"prompt": "sea"})
        base = good(http, "/completion", {"prompt": "sea", "lora": [], "n_predict": 3})
    finally:
        served.state.set_default_mix({})

    assert answer["prompt"] == "<s> poem: sea"
    assert base["prompt"] == "<s> sea"


def test_the_list_shows_task_and_prefix(served: Served) -> None:
    """GET /lora-adapters; a wrong sidecar does not spoil it."""
    with served.client("other") as http:
        entries = {entry["name"]: entry for entry in http.get("/lora-adapters").json()}

    assert entries["alpha"]["task_name"] == "poems"
    assert entries["alpha"]["prompt_prefix"] == "poem: "
    assert entries["gamma"]["task_name"] == ""


ROUTES = [
    ("/completion", {"prompt": "a", "n_predict": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize(
    "fields",
    [{"model": "beta"}, {"lora": [{"id": 1, "scale": 0.1}]}, {"adapters": {"beta": 1, "alpha": 1}}],
)
def test_an_adapter_for_one_key(
    served: Served, route: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """403 permission_error for every other key, an admin's too, on every route."""
    for key, status in (("for-beta", 200), ("other", 403), ("boss", 403), ("", 401)):
        with served.client(key) as http:
            answer = http.post(route, json={**body, **fields})
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["type"] == "permission_error"
            assert "beta" in answer.json()["error"]["message"]
            assert "for-beta" not in answer.text


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_wrong_sidecar_is_an_error_of_its_requests(
    http: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    """It names the file and the key, and no other adapter is harmed."""
    answer = http.post(route, json={**body, "model": "gamma"})

    assert answer.status_code == 400
    assert "gamma.toml: colour" in answer.json()["error"]["message"]
    good(http, route, {**body, "model": "alpha"})


def test_scale_0_needs_no_key(http: httpx.Client) -> None:
    """An adapter that is named but off is not used."""
    good(http, "/completion", {"prompt": "a", "n_predict": 1, "lora": [{"id": 1, "scale": 0}]})


def test_an_adapter_with_a_wrong_sidecar_is_not_loaded(tmp_path: Path) -> None:
    """POST /v1/load_lora_adapter refuses it, and the name goes on to mean what it meant."""
    write_files(tmp_path)
    folder = tmp_path / "adapters"
    config = ServerConfig(adapter_dir=folder)
    body = {"lora_name": "alpha", "lora_path": "beta.gguf", "load_inplace": True}
    with serving(tmp_path, config) as served, served.client() as http:
        (folder / "beta.toml").write_text("colour = 1")
        before = served.engine.registry.resolve("alpha")
        refused = http.post("/v1/load_lora_adapter", json=body)
        unchanged = served.engine.registry.resolve("alpha")
        (folder / "beta.toml").write_text("[sampling]\nmax_tokens = 2")
        loaded = http.post("/v1/load_lora_adapter", json=body)
        answer = good(http, "/completion", {"prompt": "a", "model": "alpha", "ignore_eos": True})

    assert refused.status_code == 400
    assert "beta.toml: colour" in refused.json()["error"]["message"]
    assert unchanged is before
    assert loaded.status_code == 200
    assert answer["tokens_predicted"] == 2


def test_a_default_grammar_holds_until_a_request_brings_its_own(tmp_path: Path) -> None:
    """On llama-server's and OpenAI's routes alike."""
    write_files(tmp_path)
    sidecar = tmp_path / "adapters" / "alpha.toml"
    sidecar.write_text("""[sampling]\ngrammar = 'root ::= "yes"'\n""")
    own = {"grammar": 'root ::= "no"', "model": "alpha"}
    with serving(tmp_path) as served, served.client() as http:
        first = good(http, "/completion", {"prompt": "a", "model": "alpha"})
        second = good(http, "/completion", {"prompt": "a", **own})
        third = good(http, "/v1/completions", {"prompt": "a", "model": "alpha"})

    assert (first["content"], second["content"]) == ("yes", "no")
    assert third["choices"][0]["text"] == "yes"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completion", {"prompt": "a"}),
        ("/completion", {"prompt": ["a", "b"], "stream": True}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_request_is_computed_with_what_its_key_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    """The name meant an adapter for everyone when the request was read, and was swapped before it
    was submitted: it was computed with one that is not for its key.
    """
    ids = {"fim_pre": 6, "fim_suf": 7, "fim_mid": 8}
    write_files(
        tmp_path, TinyLlama(extra={f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()})
    )
    files = tmp_path / "adapters"
    (files / "beta.toml").write_text('keys = ["for-beta"]')
    with serving(tmp_path, ServerConfig(api_keys=("for-beta", "other"))) as own:
        for_mix = own.state.sidecars.for_mix

        def swapped(*args: Any) -> Any:
            found = for_mix(*args)
            own.engine.load_adapter("alpha", files / "beta.gguf")
            return found

        old = own.engine.load_adapter("alpha", files / "alpha.gguf")
        with own.client("other") as client:
            with monkeypatch.context() as patch:
                patch.setattr(own.state.sidecars, "for_mix", swapped)
                answer = client.post(route, json={**body, "model": "alpha"})
            assert answer.status_code == 200, answer.text
            used = set(re.findall(r'"generation": ?(\d+)', answer.text))
            assert used == {str(old.number)}, answer.text
            later = client.post(route, json={**body, "model": "alpha"})
            assert later.status_code == 403, later.text
