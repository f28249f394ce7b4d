"""The page's table of adapters in a real Chromium: load, unload, pin, defaults, keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loragraph.server.config import ServerConfig
from tests.server.browser import Tab, expect, running, tab
from tests.server.serving import ADAPTERS, Served, serving, write_files
from tests.tiny import TinyAdapter, TinyLlama

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the file's tests."""
    with running() as one:
        yield one


@pytest.fixture
def served(browser: Browser, tmp_path: Path) -> Iterator[Served]:
    """A server whose adapters may be loaded from its folder."""
    write_files(tmp_path)
    adapters = tmp_path / "adapters"
    TinyAdapter(seed=9, rank=7).write(adapters / "delta.gguf", TinyLlama())
    files = {name: adapters / f"{name}.gguf" for name in ADAPTERS}
    with serving(tmp_path, ServerConfig(adapter_dir=adapters), files) as one:
        yield one


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Tab]:
    """The page of it."""
    with tab(browser, served.url) as one:
        one.row("alpha").wait_for()
        yield one


def load(page: Tab, path: str, name: str = "") -> None:
    """Fills the form and sends it."""
    page.page.get_by_role("button", name="Load an adapter").click()
    page.page.get_by_label("File in the server's folder").fill(path)
    page.page.get_by_label("Name", exact=True).fill(name)
    page.page.locator("#load-form").get_by_role("button", name="Load").click()


def test_an_adapter_is_loaded_used_and_unloaded(page: Tab, served: Served) -> None:
    """A file of the folder gets a name, answers in a column, and goes after a second press."""
    load(page, "delta.gguf", "new")
    row = page.row("new")
    row.locator(".cell-state", has_text="in memory").wait_for()
    expect(row.locator(".cell-rank")).to_have_text("7")
    expect(page.page.locator("#load-form")).to_be_hidden()

    page.page.get_by_role("button", name="Add a column").click()
    page.page.get_by_label("Search adapters").fill("new")
    page.page.keyboard.press("Enter")
    page.ask("Why?")
    result = served.engine.generate(
        [{"role": "user", "content": "Why?"}], adapters={"new": 1.0}, max_tokens=12, temperature=0.0
    )
    assert page.answer("new") == result.text

    row.get_by_role("button", name="Unload new").click()
    assert "new" in served.engine.registry.names()
    row.get_by_role("button", name="Really unload new?").click()
    row.wait_for(state="detached")
    assert "new" not in served.engine.registry.names()
    expect(page.column("new").locator("li.missing")).to_have_count(1)
    expect(page.page.get_by_label("File in the server's folder")).to_have_value("delta.gguf")
    page.check()


def test_unloading_is_taken_back_by_leaving_the_button(page: Tab, served: Served) -> None:
    """The question is forgotten when the focus goes elsewhere."""
    page.row("beta").get_by_role("button", name="Unload beta").click()
    page.page.get_by_label("Filter adapters").focus()

    page.row("beta").get_by_role("button", name="Unload beta").wait_for()
    assert "beta" in served.engine.registry.names()


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("../base.gguf", "x", "inside the adapters' folder"),
        ("nope.gguf", "", "there is no"),
        ("delta.gguf", "alpha", "already been loaded"),
        ("delta.gguf", "a/b", "expected printable characters"),
    ],
)
def test_a_load_that_is_refused_says_why(page: Tab, path: str, name: str, message: str) -> None:
    """The server's words stand above the table, and the form keeps what was written."""
    load(page, path, name)

    alert = page.page.locator("#adapters-error")
    alert.filter(has_text=message).wait_for()
    expect(page.page.get_by_label("File in the server's folder")).to_have_value(path)


def test_a_pin_and_its_end(page: Tab, served: Served) -> None:
    """Pinning loads and keeps, unpinning lets go; the row says so."""
    row = page.row("gamma")
    row.locator(".cell-state", has_text="on disk").wait_for()
    row.get_by_role("button", name="Pin gamma", exact=True).click()
    row.locator(".cell-state", has_text="pinned").wait_for()
    assert [one.name for one in served.engine.adapters if one.pinned] == ["gamma"]

    row.get_by_role("button", name="Unpin gamma").click()
    row.locator(".cell-state", has_text="in memory").wait_for()
    assert not any(one.pinned for one in served.engine.adapters)
    page.check()


def test_a_reload_makes_a_new_generation(page: Tab, served: Served) -> None:
    """A file that was replaced is read again under its name."""
    before = served.engine.registry.resolve("beta").number
    new = served.folder / "new.gguf"
    TinyAdapter(seed=11, rank=6).write(new, TinyLlama())
    new.replace(served.folder / "adapters" / "beta.gguf")
    row = page.row("beta")
    row.get_by_role("button", name="Load beta", exact=True).click()

    row.locator(".cell-rank", has_text="6").wait_for()
    assert served.engine.registry.resolve("beta").number > before
    assert row.locator(".cell-generation").inner_text() == str(
        served.engine.registry.resolve("beta").number
    )
    page.check()


def test_a_default_scale_is_for_requests_that_name_none(page: Tab, served: Served) -> None:
    """The field changes the server's default mix; other defaults stay; columns do not change."""
    served.state.set_default_mix({"beta": 0.25})
    field = page.page.get_by_label("Default scale of alpha")
    field.fill("0.5")
    field.press("Enter")
    field.blur()

    page.row("beta").locator("input.default").and_(
        page.page.locator("input:not([aria-busy])")
    ).wait_for()
    page.page.wait_for_timeout(100)
    for _ in range(100):
        if served.state.default_mix == {"alpha": 0.5, "beta": 0.25}:
            break
        page.page.wait_for_timeout(50)
    assert served.state.default_mix == {"alpha": 0.5, "beta": 0.25}
    page.ask("Why?")
    result = served.engine.generate(
        [{"role": "user", "content": "Why?"}], max_tokens=12, temperature=0.0
    )
    assert page.answer("base") == result.text
    page.check()


def test_the_filter_shows_what_fits(page: Tab) -> None:
    """Rows whose name holds the text are left, and how many of how many is told."""
    page.page.get_by_label("Filter adapters").fill("MM")
    page.row("alpha").wait_for(state="detached")

    expect(page.page.locator("tbody tr")).to_have_count(1)
    assert page.page.locator("#adapters-note").inner_text().startswith("1 of 3 names")


def test_a_key_is_asked_for_and_kept_in_the_session(browser: Browser, tmp_path: Path) -> None:
    """Without the key the page says so; with it all works; it is in no lasting storage."""
    write_files(tmp_path)
    config = ServerConfig(
        api_keys=("secret",), admin_keys=("boss",), adapter_dir=tmp_path / "adapters"
    )
    with serving(tmp_path, config) as served, tab(browser, served.url) as one:
        one.page.locator("#status", has_text="key needed").wait_for()
        one.ask("Why?")
        one.page.locator("#ask-error", has_text="API key").wait_for()
        key = one.page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("secret")
        one.row("alpha").wait_for()
        one.ask("Why?")
        assert one.answer("alpha")

        one.row("alpha").get_by_role("button", name="Pin alpha", exact=True).click()
        one.page.locator("#adapters-error", has_text="admin key").wait_for()
        key.fill("boss")
        one.row("alpha").get_by_role("button", name="Pin alpha", exact=True).click()
        one.row("alpha").locator(".cell-state", has_text="pinned").wait_for()

        stores = one.page.evaluate(
            "() => [JSON.stringify(localStorage), document.cookie, location.href]"
        )
        assert not any(re.search("secret|boss", text) for text in stores)
        one.page.reload()
        one.row("alpha").wait_for()
