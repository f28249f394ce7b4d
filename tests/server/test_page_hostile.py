"""The page against what it is not made for: markup everywhere, slow and dead servers, crowds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loragraph.server.config import ServerConfig
from tests.server.browser import Tab, expect, running, tab
from tests.server.serving import Served, serving, write_files

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

MARKUP = "<img src=x onerror=alert(1)>"
NAMES = (
    MARKUP,
    "<script>alert(1)<!--",
    "'\"><svg onload=alert(1)>",
    "javascript:alert(1)",
    "${alert(1)}{{7*7}}",
    "a,b:c#d&mix=e%20%zz",
    "__proto__",
    "constructor",
    "é漢字🙂",
    "W" * 128,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the file's tests."""
    with running() as one:
        yield one


def run(name: str = "base", text: str = "", **fields: Any) -> str:
    """An answer of /api/compare with one column."""
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    event = f"data: {json.dumps({**chunk, **fields})}\n\n"
    lines = [{"index": 0, "body": event}, {"index": 0, "end": True}]
    return "".join(json.dumps(line) + "\n" for line in lines)


def answer(page: Tab, body: str, status: int = 200, content: str = "application/x-ndjson") -> None:
    """Has the next questions answered with this."""

    def fulfil(route: Route) -> None:
        route.fulfill(status=status, body=body, content_type=content)

    page.page.route("**/api/compare", fulfil)


def test_names_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    """Names that are markup, script, addresses or object properties are names like others."""
    write_files(tmp_path)
    file = tmp_path / "adapters" / "alpha.gguf"
    with (
        serving(tmp_path, adapters=dict.fromkeys(NAMES, file)) as served,
        tab(browser, served.url, viewport={"width": 390, "height": 800}) as page,
    ):
        page.page.on("dialog", lambda dialog: page.errors.append(dialog.message))
        for name in NAMES:
            page.row(name).wait_for()
        for name in NAMES:
            page.page.get_by_role("button", name="Add a column").click()
            page.page.get_by_label("Search adapters").fill(name)
            page.page.keyboard.press("Enter")
            page.column(name).first.wait_for()
        page.page.reload()  # the address holds them all
        page.row(MARKUP).wait_for()
        for name in NAMES:
            page.column(name).first.wait_for()
        page.ask("Why?")
        columns = page.page.locator(".column").count()
        expect(page.page.locator("p.text:last-child[aria-busy=false]")).to_have_count(columns)

        assert page.page.get_by_role("article").get_by_role("alert").all_inner_texts() == []
        expect(page.page.locator("main img, main svg, main script")).to_have_count(0)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390, (
            page.page.evaluate(
                "[...document.querySelectorAll('*')]"
                ".filter((one) => one.getBoundingClientRect().right > 390)"
                ".map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`)"
            )
        )
        page.check()


def test_files_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    """A file's name that is markup stands in the table, is reloaded and refused as text."""
    write_files(tmp_path)
    folder = tmp_path / "adapters"
    (folder / "alpha.gguf").rename(folder / f"{MARKUP}.gguf")
    config = ServerConfig(adapter_dir=folder)
    with (
        serving(tmp_path, config, adapters={}, adapter_dir=folder) as served,
        tab(browser, served.url) as page,
    ):
        page.row(MARKUP).get_by_role("button", name=f"Load {MARKUP}", exact=True).click()
        page.row(MARKUP).locator(".cell-state", has_text="in memory").wait_for()
        page.page.get_by_role("button", name="Load an adapter").click()
        page.page.get_by_label("File in the server's folder").fill(f"{MARKUP}.nope")
        page.page.keyboard.press("Enter")
        page.page.locator("#adapters-error", has_text=MARKUP).wait_for()
        expect(page.page.locator("main img")).to_have_count(0)


@pytest.mark.parametrize(
    "text",
    [
        MARKUP,
        "</p></article><script>alert(1)</script>",
        "a\u202eb\u0000c\ufffd\ud83d",
        "\n" * 50 + "x" * 5000,
        "  two  spaces\n\tand a tab",
    ],
)
def test_answers_are_text(browser: Browser, served: Served, text: str) -> None:
    """What a model writes is shown letter by letter, whatever it is."""
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        answer(page, run(text=text))
        page.ask("Why?")

        shown = page.answer("base")
        assert shown == text.replace("\ud83d", "\ufffd") or shown == text
        expect(page.page.locator("main img, main script")).to_have_count(0)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 1280
        page.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"usage": {"prompt_tokens": MARKUP, "completion_tokens": None}},
        {"usage": [], "timings": "x", "adapters": {}},
        {"adapters": [{"name": MARKUP, "scale": "x"}, {}]},
        {"timings": {"predicted_per_second": None, "cache_n": -1}},
    ],
)
def test_odd_figures_do_no_harm(browser: Browser, served: Served, fields: dict[str, Any]) -> None:
    """Figures of other types than ours are left out or shown as text."""
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        answer(page, run(text="words", **fields))
        page.ask("Why?")

        assert page.answer("base") == "words"
        page.check()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "broke off"),
        ("<html>nothing here</html>\n", "not JSON"),
        (json.dumps({"index": 0, "body": "data: {\n\n"}) + "\n", "cannot be read"),
        (json.dumps({"index": 99, "body": "data: 1\n\n"}) + "\n", "broke off"),
        (json.dumps({"index": 0, "body": "data: null\n\n"}) + "\n", "cannot be read"),
        (json.dumps({"index": 0, "status": 500, "error": "<b>"}) + "\n", "status 500"),
        (
            json.dumps({"index": 0, "body": 'data: {"error": {"message": "no cells"}}\n\n'}) + "\n",
            "no cells",
        ),
        ("null\n", "cannot be read"),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    browser: Browser, served: Served, body: str, message: str
) -> None:
    """Whatever comes instead of an answer is told in the page, which goes on working."""
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        answer(page, body)
        page.ask("Why?")
        page.page.get_by_role("alert").filter(has_text=message).first.wait_for()
        page.page.unroute("**/api/compare")
        page.ask("Why?")

        assert page.answer("base")
        page.check()


def test_a_proxys_error_page_is_told_by_its_status(browser: Browser, served: Served) -> None:
    """An error that is no JSON, as of a proxy, is told in words and leaves no column waiting."""
    with tab(browser, served.url) as page:
        page.row("alpha").wait_for()
        answer(page, "<h1>Bad gateway</h1>", 502, "text/html")
        page.ask("Why?")
        page.page.locator("#ask-error", has_text="status 502").wait_for()

        expect(page.page.locator(".column.busy")).to_have_count(0)


def test_a_server_that_goes_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """The page says that nobody answers, keeps what it shows, and goes on when one does."""
    write_files(tmp_path)
    with serving(tmp_path) as served, tab(browser, served.url) as page:
        page.row("alpha").wait_for()
        page.page.route("**/api/**", lambda route: route.abort("connectionrefused"))
        page.page.locator("#status", has_text="no answer").wait_for()
        page.ask("Why?")
        page.page.locator("#ask-error", has_text="does not answer").wait_for()
        expect(page.row("alpha")).to_be_visible()
        expect(page.page.get_by_role("button", name="Ask")).to_be_enabled()

        page.page.unroute("**/api/**")
        page.page.locator("#status", has_text="ready").wait_for()
        page.ask("Why?")
        assert page.answer("base")


def test_a_server_that_dies_within_an_answer(browser: Browser, served: Served) -> None:
    """What came so far stays, with the words that the rest did not come."""
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "half of"}}]}\n\n'
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        answer(page, json.dumps({"index": 0, "body": event}) + "\n")
        page.ask("Why?")
        page.column("base").get_by_role("alert").filter(has_text="broke off").wait_for()

        assert page.answer("base") == "half of"
        page.check()


def test_a_slow_server_is_not_asked_twice(browser: Browser, served: Served) -> None:
    """While an answer is awaited no second question for the state is sent."""
    waiting: list[Route] = []
    with tab(browser, served.url) as page:
        page.row("alpha").wait_for()
        page.page.route("**/api/state*", lambda route: waiting.append(route))
        page.page.wait_for_timeout(3500)
        n_waiting = len(waiting)
        for route in waiting:
            route.continue_()
        page.page.unroute("**/api/state*")

        assert n_waiting == 1
        page.check()


def test_stop_ends_the_wait_for_a_server_that_hangs(browser: Browser, served: Served) -> None:
    """Where no answer begins, stopping sets the page free."""
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        page.page.route("**/api/compare", lambda _route: None)
        page.ask("Why?")
        page.page.get_by_role("button", name="Stop").click()
        page.column("base").locator("[data-fact=end] dd", has_text="stopped").wait_for()

        expect(page.page.get_by_role("button", name="Ask")).to_be_enabled()
        page.check()


def test_the_page_works_below_a_proxys_prefix(browser: Browser, served: Served) -> None:
    """Behind a proxy that takes a prefix off, every address is below that prefix."""
    asked: list[str] = []

    def proxy(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/", 1)))

    with tab(browser, served.url) as page:
        page.page.route("**/llm/**", proxy)
        page.page.on("request", lambda request: asked.append(request.url))
        page.page.goto(f"{served.url}/llm/#mix=alpha")
        page.row("alpha").wait_for()
        asked.clear()
        page.ask("Why?")

        assert page.answer("alpha")
        assert asked
        assert all("/llm/" in url for url in asked)
        page.check()


def rows(n: int, tokens: int = 0) -> list[dict[str, Any]]:
    """A table as the server sends it."""
    coverage = {f"ffn_{i}": [i, 30] for i in range(7)}
    return [
        {
            "name": f"adapter-{i:04}",
            "generation": i,
            "file": f"{i}.gguf",
            "state": "resident" if i % 3 else "absent",
            "pinned": False,
            "nbytes": 1 << 22,
            "rank": 16,
            "n_targets": 21,
            "n_base_targets": 210,
            "coverage": coverage,
            "alora": False,
            "n_users": 0,
            "id": i,
            "default_scale": 0.0,
            "tokens": tokens + i,
        }
        for i in range(n)
    ]


def test_a_thousand_adapters(browser: Browser, served: Served) -> None:
    """A crowd is shown in part, found by name, shown whole on demand, and updated in place."""
    with served.client() as http:
        real = http.get("/api/state").json()
    tokens = 0

    def crowd(route: Route) -> None:
        nonlocal tokens
        tokens += 1
        body = {**real, "table": str(tokens), "all": True, "adapters": rows(1000, tokens)}
        route.fulfill(json=body)

    context = browser.new_context()
    page = context.new_page()
    page.route("**/api/state*", crowd)
    page.goto(f"{served.url}/")
    page.locator("tr[data-adapter='adapter-0099']").wait_for()
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_label("Filter adapters").fill("0777")
    page.locator("tr[data-adapter='adapter-0777']").wait_for()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Filter adapters").fill("")
    page.get_by_role("button", name="Show 500 more adapters of 900").click()
    page.get_by_role("button", name="Show 400 more adapters").click()
    row = page.locator("tr[data-adapter='adapter-0999']")
    row.wait_for()
    pin = row.get_by_role("button", name="Pin")
    pin.focus()
    before = row.locator(".cell-tokens").inner_text()
    row.locator(".cell-tokens").filter(has_not_text=before).wait_for()
    expect(pin).to_be_focused()
    expect(page.locator("tbody tr")).to_have_count(1000)

    page.get_by_role("button", name="Add a column").click()
    assert page.get_by_role("dialog").locator("li").count() <= 60
    page.get_by_label("Search adapters").fill("0421")
    page.keyboard.press("Enter")
    page.get_by_role("article", name="adapter-0421", exact=True).wait_for()
    context.close()


def test_a_long_answer_stays_quick(browser: Browser, served: Served) -> None:
    """Ten thousand pieces are painted by frames, not one by one, and nothing is lost."""
    piece = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    lines = [{"index": 0, "body": f"data: {json.dumps(piece)}\n\n"}] * 10_000
    lines += [{"index": 0, "body": f"data: {json.dumps(last)}\n\n"}, {"index": 0, "end": True}]
    with tab(browser, served.url, "#base") as page:
        page.row("alpha").wait_for()
        answer(page, "".join(json.dumps(line) + "\n" for line in lines))
        page.ask("Why?")

        assert page.answer("base") == "word " * 10_000
        page.check()


@pytest.mark.parametrize(
    "fragment",
    [
        "#mix=",
        "#mix=%",
        "#mix=a:1e999",
        "#mix=a:NaN",
        "#mix=alpha:1,alpha:2",
        "#nonsense",
        "#mix=" + "&mix=".join(["alpha"] * 300),
        "#mix=%3Cimg%20src=x%20onerror=alert(1)%3E",
    ],
)
def test_an_address_from_elsewhere_does_no_harm(
    browser: Browser, served: Served, fragment: str
) -> None:
    """Whatever stands behind the hash, the page opens, with at most 32 columns, and answers."""
    with tab(browser, served.url, fragment) as page:
        page.row("alpha").wait_for()
        assert page.page.get_by_role("article").count() <= 32
        page.ask("Why?", 2)
        assert page.answer("base")
        page.check()
