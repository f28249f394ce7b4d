"""Folders of PEFT loaded over HTTP."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from loragraph.adapters.convert import convert
from loragraph.server.config import ServerConfig
from tests.adapters.convert.folders import lora, peft
from tests.server.serving import Served, serving, write_files

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODULES = {
    f"model.layers.{il}.self_attn.{name}": shape
    for il in range(2)
    for name, shape in (("q_proj", (64, 64)), ("v_proj", (32, 64)))
}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose folder holds an adapter as PEFT writes it, and temporary files of its own."""
    write_files(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "adapters"
    peft(folder / "mine", lora(MODULES))
    with serving(tmp_path, ServerConfig(adapter_dir=folder), {}, adapter_dir=folder) as one:
        yield one


def left_over(folder: Path) -> list[Path]:
    """Temporary files that are still there."""
    return list((folder / "temporary").iterdir())


def load(http: httpx.Client, path: str, **fields: object) -> httpx.Response:
    """Loads a path as "x"."""
    return http.post(LOAD, json={"lora_name": "x", "lora_path": path, **fields})


def text(http: httpx.Client, model: str) -> str:
    """A greedy answer."""
    body = {"prompt": "hello", "model": model, "max_tokens": 8, "temperature": 0}
    return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_a_folder_is_converted(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    """It answers as the file that convert() makes of it; no file is left, loaded or not."""
    source = served.folder / "adapters" / "mine"
    file, _ = convert(source, served.folder / "base.gguf", tmp_path / "direct.gguf")
    direct = served.engine.load_adapter("direct", file)

    assert load(http, "mine").status_code == 200
    assert text(http, "x") == text(http, "direct") != text(http, "base")
    assert served.engine.registry.resolve("x").digest == direct.digest
    assert http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
    assert left_over(tmp_path) == []
    assert sorted(path.name for path in source.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_replacing_a_folder(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    """By itself, and by a file; a folder that is refused leaves the name as it was."""
    for _ in range(2):
        assert load(http, "mine", load_inplace=True).status_code == 200
    peft(served.folder / "adapters" / "other", lora({"model.layers.0.self_attn.q_proj": (16, 16)}))
    digest = served.engine.registry.resolve("x").digest
    assert load(http, "other", load_inplace=True).status_code == 400
    assert served.engine.registry.resolve("x").digest == digest
    assert load(http, "alpha.gguf", load_inplace=True).status_code == 200
    assert served.engine.registry.resolve("x").digest != digest
    assert left_over(tmp_path) == []


def test_folders_of_the_folder_are_models(served: Served, http: httpx.Client) -> None:
    """--lora-dir has folders by name, with sidecars; one whose links lead out is refused."""
    (served.folder / "adapters" / "mine.toml").write_text('task_name = "tales"\n')
    leak = served.folder / "adapters" / "leak"
    leak.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        outside = served.folder / name
        (served.folder / "adapters" / "mine" / name).rename(outside)
        (leak / name).symlink_to(outside)
        (served.folder / "adapters" / "mine" / name).write_bytes(outside.read_bytes())

    assert {"mine", "leak"} <= {one["id"] for one in http.get("/v1/models").json()["data"]}
    assert text(http, "mine") != text(http, "base")
    assert served.state.sidecars.of(served.engine.registry.resolve("mine")).task_name == "tales"
    body = {"prompt": "hello", "model": "leak", "max_tokens": 2}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "leads out" in answer.text
    assert str(served.folder) not in answer.text


def test_folders_that_are_refused(served: Served, http: httpx.Client, tmp_path: Path) -> None:
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
    assert left_over(tmp_path) == []
