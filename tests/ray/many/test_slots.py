"""Slots of one member through a front; of several, by the header that names them."""

from __future__ import annotations

from pathlib import Path

from loragraph.server.config import ServerConfig
from tests.ray import fleet
from tests.ray.same import taken_from
from tests.server.llamacpp import test_slots
from tests.server.serving import write_files

TAKEN = (test_slots,)
IDS = "a"
globals().update(
    taken_from(
        test_slots,
        ("test_files_that_are_none",),  # it has the single server's engine write files
        own_server=True,
    )
)


def test_a_slot_is_saved_where_its_request_was(tmp_path: Path) -> None:
    """With X-Loragraph-Replica of the answer, and found there again by requests that have it."""
    write_files(tmp_path)
    (tmp_path / "slots").mkdir()
    body = {"n_predict": 4, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    config = ServerConfig(slot_save_path=tmp_path / "slots")
    homes = set()
    with fleet.serving(tmp_path, config, max_sequences=4) as one, one.client() as http:
        for number in range(24):
            prompt = list(range(100 + number, 150 + number))
            answer = http.post("/completion", json={**body, "prompt": prompt})
            home = answer.headers["x-loragraph-replica"]
            homes.add(home)
            there = {"X-Loragraph-Replica": home}
            slot = f"/slots/{answer.json()['id_slot']}"
            name = {"filename": f"{number}.bin"}
            saved = http.post(f"{slot}?action=save", json=name, headers=there).json()
            erased = http.post(f"{slot}?action=erase", headers=there).json()
            restored = http.post(f"{slot}?action=restore", json=name, headers=there).json()
            again = http.post("/completion", json={**body, "prompt": prompt}, headers=there)
            assert saved["n_saved"] == restored["n_restored"] == len(prompt) + 3
            assert erased["n_erased"] > 0
            assert again.headers["x-loragraph-replica"] == home
            assert again.json()["timings"]["cache_n"] == len(prompt) - 1
            assert again.json()["content"] == answer.json()["content"]
    assert homes == {"a", "b"}
