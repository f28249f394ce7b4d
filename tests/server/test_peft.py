"""Folders of PEFT loaded over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from loragraph.server.config import ServerConfig
from loragraph.tools.convert import convert
from tests.server.serving import Served, serving, write_files
from tests.tools.convert.folders import lora, peft

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODULES = {
    f"model.layers.{il}.self_attn.{name}": shape
    for il in range(2)
    for name, shape in (("q_proj", (64, 64)), ("v_proj", (32, 64)))
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server whose folder holds an adapter as PEFT writes it."""
    write_files(tmp_path)
    folder = tmp_path / "adapters"
    peft(folder / "mine", lora(MODULES))
    with serving(tmp_path, ServerConfig(adapter_dir=folder), {}) as one:
        yield one


def load(http: httpx.Client, path: str, **fields: object) -> httpx.Response:
    """Loads a path as "x"."""
    return http.post(LOAD, json={"lora_name": "x", "lora_path": path, **fields})


def text(http: httpx.Client, model: str) -> str:
    """A greedy answer."""
    body = {"prompt": "hello", "model": model, "max_tokens": 8, "temperature": 0}
    return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_a_folder_is_converted(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    """It answers as the file that convert() makes of it; unloaded, nothing of it is left."""
    source = served.folder / "adapters" / "mine"
    file, _ = convert(source, served.folder / "base.gguf", tmp_path / "direct.gguf")
    direct = served.engine.load_adapter("direct", file)

    assert load(http, "mine").status_code == 200
    assert text(http, "x") == text(http, "direct") != text(http, "base")
    assert served.engine.registry.resolve("x").digest == direct.digest
    assert list(served.state.folder.rglob("*.gguf"))
    assert http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
    assert not list(served.state.folder.rglob("*.gguf"))
    assert sorted(path.name for path in source.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_replacing_keeps_one_file(served: Served, http: httpx.Client) -> None:
    """Of several conversions for one name only the last one's file stays."""
    for _ in range(3):
        assert load(http, "mine", load_inplace=True).status_code == 200

    assert len(list(served.state.folder.rglob("*.gguf"))) == 1
    assert load(http, "alpha.gguf", load_inplace=True).status_code == 200
    assert not list(served.state.folder.rglob("*.gguf"))


def test_folders_that_are_refused(served: Served, http: httpx.Client) -> None:
    """Pickled weights, links that lead out, another base's shapes, no adapter at all."""
    folder = served.folder / "adapters"
    pickled = peft(folder / "pickled", lora(MODULES))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    linked = peft(folder / "linked", lora(MODULES))
    (linked / "adapter_config.json").unlink()
    (linked / "adapter_config.json").symlink_to(served.folder / "base.gguf")
    peft(folder / "other", lora({"model.layers.0.self_attn.q_proj": (16, 16)}))
    (folder / "empty").mkdir()

    for name in ("pickled", "linked", "other", "empty", "."):
        answer = load(http, name)
        assert answer.status_code == 400, name
        assert str(served.folder) not in answer.text
    assert http.get("/v1/models/x").status_code == 404
    assert not list(served.state.folder.rglob("*.gguf"))


def test_what_was_converted_goes_with_the_server(tmp_path: Path) -> None:
    """Its folder is removed at the end."""
    write_files(tmp_path)
    peft(tmp_path / "adapters" / "mine", lora(MODULES))
    config = ServerConfig(adapter_dir=tmp_path / "adapters")
    with serving(tmp_path, config, {}) as one, one.client() as client:
        assert load(client, "mine").status_code == 200
        folder = one.state.folder

    assert not folder.exists()
