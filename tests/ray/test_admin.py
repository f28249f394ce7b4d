"""Changes of the catalogue that are taken back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loragraph.cluster.catalogue import Catalogue, Change, Op
from loragraph.cluster.content import Content
from loragraph.errors import CapacityError
from loragraph.ray.admin import CatalogueAdmin
from loragraph.server.adapters_api import LoadBody

OLD, MINE, OTHERS = (Content(f"file:///{i}", str(i) * 64, 1) for i in range(3))


class Shared:
    """The catalogue alone, as SharedCatalogue gives it."""

    def __init__(self) -> None:
        self.catalogue = Catalogue()

    @property
    def entries(self) -> Any:
        """By name."""
        return self.catalogue.entries

    def refresh(self) -> None:
        """There is no other copy."""

    def change(self, op: Op, name: str, **what: Any) -> int:
        """Applied at once."""
        change: Change = getattr(self.catalogue, op.value)(name, **what)
        self.catalogue.apply([change])
        return change.version


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("other", ["nothing", "swap", "drop"])
def test_a_load_without_room_takes_back_only_its_own_change(
    known: bool, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another replica registered or dropped meanwhile was dropped, or swapped back."""
    shared = Shared()
    if known:
        shared.change(Op.REGISTER, "a", content=OLD)

    def preload(name: str) -> None:
        if other == "swap":
            shared.change(Op.SWAP, name, content=OTHERS)
        elif other == "drop":
            shared.change(Op.DROP, name)
        raise CapacityError("no room")

    admin = CatalogueAdmin(cast(Any, shared), cast(Any, None), ())
    monkeypatch.setattr("loragraph.ray.admin.check_load", lambda state, body: None)
    monkeypatch.setattr(admin, "_source", lambda state, given: given)
    monkeypatch.setattr(admin, "_checked", lambda engine, source: MINE)
    state = SimpleNamespace(engine=SimpleNamespace(preload=preload))
    body = LoadBody(lora_name="a", lora_path="mine", load_inplace=True)
    with pytest.raises(CapacityError):
        admin.load(cast(Any, state), body)
    left = {name: entry.content for name, entry in shared.entries.items()}
    before = {"a": OLD} if known else {}
    assert left == {"nothing": before, "swap": {"a": OTHERS}, "drop": {}}[other]
