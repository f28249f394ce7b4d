"""POST /slots: what a slot held is saved, restored and erased; names lead out of no folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving, write_files

PROMPT = list(range(150, 200))
N_HELD = len(PROMPT) + 3  # of an answer of four tokens the last has no cell


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """A server that saves slots; for one test, since they count cells."""
    write_files(tmp_path)
    (tmp_path / "slots").mkdir()
    config = ServerConfig(slot_save_path=tmp_path / "slots")
    with serving(tmp_path, config, max_sequences=4) as one:
        yield one


@pytest.fixture
def http(own: Served) -> Iterator[httpx.Client]:
    """A client of it."""
    with own.client() as client:
        yield client


def ask(http: httpx.Client, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """An answer of four tokens."""
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True, **fields}
    return dict(http.post("/completion", json=body).json())


def act(http: httpx.Client, action: str, slot: Any = 0, **fields: Any) -> httpx.Response:
    """An action on a slot."""
    return http.post(f"/slots/{slot}?action={action}", json=fields)


@pytest.mark.parametrize("adapters", [{}, {"alpha": 0.5}])
def test_what_is_restored_is_found(http: httpx.Client, own: Served, adapters: Any) -> None:
    """By the same prompt under the same mix; the text is what it was; llama-server's fields."""
    first = ask(http, adapters=adapters)
    assert first["id_slot"] == 0
    saved = act(http, "save", filename="a.bin").json()
    assert act(http, "erase").json() == {"id_slot": 0, "n_erased": N_HELD}
    assert ask(http, adapters=adapters, cache_prompt=False)["timings"]["cache_n"] == 0

    restored = act(http, "restore", slot=2, filename="a.bin").json()
    again = ask(http, adapters=adapters)
    other = ask(http, adapters={"beta": 1.0})

    assert saved["n_saved"] == restored["n_restored"] == N_HELD
    assert saved["n_written"] == restored["n_read"]
    assert saved["n_written"] == (own.folder / "slots" / "a.bin").stat().st_size
    assert (saved["id_slot"], restored["id_slot"]) == (0, 2)
    assert saved["filename"] == restored["filename"] == "a.bin"
    assert saved["timings"]["save_ms"] > 0
    assert restored["timings"]["restore_ms"] > 0
    assert again["timings"]["cache_n"] == len(PROMPT) - 1
    assert again["content"] == first["content"]
    assert other["timings"]["cache_n"] == 0


def test_a_restored_slot_can_be_saved_again(http: httpx.Client) -> None:
    """It is what the slot holds now; restoring what is there already counts it too."""
    ask(http)
    act(http, "save", filename="a.bin")
    counts = [act(http, "restore", slot=3, filename="a.bin").json()["n_restored"] for _ in "ab"]

    assert counts == [N_HELD, N_HELD]
    assert act(http, "save", slot=3, filename="b.bin").json()["n_saved"] == N_HELD
    assert act(http, "erase", slot=3).json()["n_erased"] == N_HELD
    assert act(http, "erase", slot=3).json()["n_erased"] == 0
    assert ask(http)["timings"]["cache_n"] == 0


def test_erasing_leaves_what_others_go_on_from(http: httpx.Client) -> None:
    """The beginning that a cached text shares stays."""
    ask(http, [*PROMPT, 5, 6, 7])
    longer = ask(http, [*PROMPT, 8])
    assert longer["timings"]["cache_n"] == len(PROMPT)

    assert act(http, "erase").json()["n_erased"] == 1 + 3  # 8, and what was generated
    assert ask(http, [*PROMPT, 5, 6, 9])["timings"]["cache_n"] == len(PROMPT) + 2


def test_an_empty_slot(http: httpx.Client) -> None:
    """Nothing is saved, restored and erased."""
    assert act(http, "save", slot=1, filename="none").json()["n_saved"] == 0
    assert act(http, "restore", slot=1, filename="none").json()["n_restored"] == 0
    assert http.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": 0}


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", "c:a", "a..b", "a*", "a?", 'a"b'),
        *("a\n", "a\0b", " a", "a ", "a.", "x" * 300, "\u2215a", "a|b", "<a>", 5, None, ["a"]),
    ],
)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_names_lead_nowhere_else(own: Served, action: str, name: Any) -> None:
    """400, and no file is made."""
    before = sorted(path for path in own.folder.rglob("*"))
    with own.client() as http:
        answer = act(http, action, filename=name)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "filename"
    assert sorted(path for path in own.folder.rglob("*")) == before


@pytest.mark.parametrize("slot", ["-1", "4", "x", "1e0", "\u0661", "99999999999999999999"])
def test_slots_that_are_none(http: httpx.Client, slot: str) -> None:
    """400, as in llama-server."""
    answer = act(http, "save", slot=slot, filename="a")

    assert answer.status_code == 400
    assert "Invalid slot ID" in answer.json()["error"]["message"]


@pytest.mark.parametrize("action", ["", "load", "SAVE"])
def test_actions_that_are_none(http: httpx.Client, action: str) -> None:
    """400, as in llama-server."""
    answer = act(http, action, filename="a")

    assert answer.status_code == 400
    assert "Invalid action" in answer.json()["error"]["message"]


def test_files_that_are_none(http: httpx.Client, own: Served) -> None:
    """A missing, a damaged and a foreign file, a folder and a pipe: 400, and nothing waits."""
    folder = own.folder / "slots"
    ask(http)
    act(http, "save", filename="good")
    data = (folder / "good").read_bytes()
    (folder / "cut").write_bytes(data[:-5])
    (folder / "changed").write_bytes(data[:-40] + b"x" + data[-39:])
    (folder / "text").write_text("no cells")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    own.engine.save_session(folder / "one")
    ask(http, [9, 8, 7])
    own.engine.save_session(folder / "several")

    assert act(http, "restore", filename="one").status_code == 200
    for name in ("missing", "cut", "changed", "text", "folder", "pipe", "several"):
        answer = act(http, "restore", filename=name)
        assert answer.status_code == 400, name
        assert str(own.folder) not in answer.text
    for name in ("folder", "pipe"):
        assert act(http, "save", filename=name).status_code == 400


def test_it_needs_an_admin_key(tmp_path: Path) -> None:
    """Once keys are set: it writes files, and takes cells away."""
    write_files(tmp_path)
    config = ServerConfig(slot_save_path=tmp_path, api_keys=("k",), admin_keys=("boss",))
    with serving(tmp_path, config) as one:
        for key, status in (("k", 403), ("boss", 200)):
            with one.client(key) as client:
                assert act(client, "save", filename="a").status_code == status
                assert act(client, "erase").status_code == status
