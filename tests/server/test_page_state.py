"""What the page is told of a server."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server import page_state
from loragraph.server.page_state import ChangedRows
from tests.server.serving import Served

GREEDY = {"temperature": 0, "max_tokens": 7}
MESSAGES = [{"role": "user", "content": "Why?"}]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is taken anew."""
    monkeypatch.setattr(page_state, "MIN_AGE_S", 0.0)
    monkeypatch.setattr(page_state, "AGE_FACTOR", 0.0)


def state(http: httpx.Client, table: str = "") -> Any:
    """The answer."""
    answer = http.get("/api/state", params={"table": table})
    assert answer.status_code == 200
    return answer.json()


def test_figures_are_the_engines(http: httpx.Client, served: Served) -> None:
    """Counters, cells and requests agree with the engine's own."""
    http.post("/v1/chat/completions", json={"messages": MESSAGES, **GREEDY})
    stats = served.engine.stats()
    got = state(http)

    assert got["status"] == "ready"
    assert got["base"]["name"] == "base"
    assert got["counters"]["generated"] == stats.core.n_generated_tokens > 0
    assert got["counters"]["prompt"] == stats.core.n_prompt_tokens
    assert got["cells"]["total"] == stats.scheduler.n_cells
    assert got["cells"]["used"] == stats.scheduler.n_cells_used > 0
    assert got["requests"] == {"running": 0, "waiting": 0}


def test_rows_tell_what_the_table_shows(http: httpx.Client, served: Served) -> None:
    """Rank, targets, coverage, residency, generation and tokens served of each adapter."""
    before = {row["name"]: row for row in state(http)["adapters"]}["beta"]["tokens"]
    body = {"messages": MESSAGES, **GREEDY, "lora": [{"name": "beta", "scale": 0.5}]}
    answer = http.post("/v1/chat/completions", json=body).json()
    rows = {row["name"]: row for row in state(http)["adapters"]}
    header = served.engine.registry.resolve("beta").header

    assert list(rows) == ["alpha", "beta", "gamma"]
    row = rows["beta"]
    assert row["tokens"] - before == answer["usage"]["completion_tokens"] > 0
    assert row["rank"] == header.rank_max == 4
    assert row["n_targets"] == header.n_targets == sum(n for n, _ in row["coverage"].values())
    assert row["n_base_targets"] == sum(n for _, n in row["coverage"].values())
    assert row["state"] == "resident"
    assert row["generation"] == served.engine.registry.resolve("beta").number
    assert row["pinned"] is False


def test_a_pin_shows(http: httpx.Client, served: Served) -> None:
    """A pinned adapter is told apart, until it is unpinned."""
    served.engine.pin("gamma")
    assert {row["name"] for row in state(http)["adapters"] if row["pinned"]} == {"gamma"}
    served.engine.unpin("gamma")
    assert not any(row["pinned"] for row in state(http)["adapters"])


def test_only_changed_rows_are_sent(http: httpx.Client, served: Served) -> None:
    """With the last table's tag come the rows that changed since, and the names that are gone."""
    first = state(http)
    assert first["all"] is True
    still = state(http, first["table"])
    assert (still["all"], still["adapters"], still["removed"]) == (False, [], [])

    served.engine.load_adapter("delta", served.folder / "adapters" / "alpha.gguf")
    second = state(http, first["table"])
    assert [row["name"] for row in second["adapters"]] == ["delta"]
    served.engine.unload_adapter("delta")
    third = state(http, second["table"])
    assert (third["adapters"], third["removed"]) == ([], ["delta"])


@pytest.mark.parametrize("tag", ["x", "-1", "abc-1", "é-٣", "0" * 100_000, "%00", "\n"])
def test_a_tag_of_another_table_gets_all_rows(http: httpx.Client, tag: str) -> None:
    """Whatever the tag says, the answer is whole."""
    assert state(http, tag[:4000])["all"] is True


def test_removals_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a table from before the remembered removals gets all rows, never a wrong table."""
    monkeypatch.setattr(page_state, "MAX_REMOVED", 2)
    rows = ChangedRows()
    names = [str(i) for i in range(6)]
    rows.take({name: {"name": name} for name in names})
    tags = [rows.tag]
    tables = [set(names)]
    for i in range(1, 6):
        rows.take({name: {"name": name} for name in names[i:]})
        tags.append(rows.tag)
        tables.append(set(names[i:]))

    for tag, table in zip(tags, tables, strict=True):
        change = rows.since(tag)
        seen = set() if change["all"] else table - set(change["removed"])
        assert seen | {row["name"] for row in change["adapters"]} == set(names[5:])
    assert rows.since(tags[0])["all"] is True
    assert rows.since(tags[-2])["all"] is False


def test_a_name_that_comes_back_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was removed and added again is a changed row, and no removal."""
    rows = ChangedRows()
    rows.take({"a": {"n": 1}})
    tag = rows.tag
    rows.take({})
    rows.take({"a": {"n": 1}})

    assert rows.since(tag)["removed"] == []
    assert rows.since(tag)["adapters"] == [{"n": 1}]


def test_many_viewers_cost_one_snapshot(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a snapshot's life nobody makes the engine work again."""
    monkeypatch.setattr(page_state, "MIN_AGE_S", 60.0)
    calls: list[Any] = []
    take = page_state._take

    def counted(*args: Any) -> Any:
        calls.append(args)
        return take(*args)

    monkeypatch.setattr(page_state, "_take", counted)
    answers = [state(http) for _ in range(5)]

    assert len(calls) == 1
    assert all(answer["time_s"] == answers[0]["time_s"] for answer in answers)
    page_state.of(served.state)._valid_until = 0.0
