"""A real Chromium for the tests of the page; they are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "LORAGRAPH_CHROMIUM"  # names another one
# As root, and in containers, Chromium's own sandbox cannot be set up; it sees this server alone.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
TIMEOUT_MS = 30_000


def chromium() -> str | None:
    """The program, or None."""
    names = (os.environ.get(VARIABLE) or "", *NAMES)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def running() -> Iterator[Browser]:
    """A browser; skips the test where Chromium or playwright is missing."""
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium here (Debian: apt-get install chromium, or set {VARIABLE})")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        yield browser
        browser.close()


def expect(locator: Locator) -> Any:
    """Playwright's assertions: what is asserted this way may become true a little later."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    sync_api.expect.set_options(timeout=TIMEOUT_MS)
    return sync_api.expect(locator)


@dataclass
class Tab:
    """One page that has been opened, and what went on in it."""

    page: Page
    origin: str
    asked: list[str] = field(default_factory=list)  # all addresses
    foreign: list[str] = field(default_factory=list)  # those elsewhere
    errors: list[str] = field(default_factory=list)  # of the console and of scripts

    def check(self) -> None:
        """Nothing left the origin, and no script failed."""
        assert self.foreign == []
        assert self.errors == []

    def column(self, name: str) -> Any:
        """The column of that title."""
        return self.page.get_by_role("article", name=name, exact=True)

    def answer(self, name: str) -> str:
        """The finished answer of a column."""
        column = self.column(name)
        column.locator("p.text:last-child[aria-busy=false]").wait_for()
        return str(column.locator(".text").last.evaluate("element => element.textContent"))

    def row(self, name: str) -> Any:
        """The row of an adapter."""
        return self.page.get_by_role("row").filter(
            has=self.page.get_by_role("rowheader", name=name, exact=True)
        )

    def ask(self, question: str, max_tokens: int = 12) -> None:
        """Asks, with that limit."""
        tokens = self.page.get_by_label("Max. tokens")
        if not tokens.is_visible():
            self.page.locator("#settings-toggle").click()
        tokens.fill(str(max_tokens))
        self.page.get_by_label("Question").fill(question)
        self.page.keyboard.press("Enter")


@contextmanager
def tab(browser: Browser, url: str, fragment: str = "", **options: Any) -> Iterator[Tab]:
    """The page of a server in a fresh context."""
    context = browser.new_context(reduced_motion="reduce", **options)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    parts = urlsplit(url)
    one = Tab(page, f"{parts.scheme}://{parts.netloc}")

    def note(request: Any) -> None:
        one.asked.append(request.url)
        if not request.url.startswith(f"{one.origin}/"):
            one.foreign.append(request.url)

    page.on("request", note)
    page.on("pageerror", lambda error: one.errors.append(str(error)))
    page.on(
        "console",
        lambda message: one.errors.append(message.text) if message.type == "error" else None,
    )
    try:
        page.goto(f"{url}/{fragment}")
        yield one
    finally:
        context.close()
