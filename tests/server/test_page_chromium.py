"""The page in a real Chromium, over a real socket, with tiny models."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.browser import Tab, expect, running, tab
from tests.server.serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUESTION = "Why is the sky blue?"
MIXES = "#mix=alpha&mix=alpha:0.5,beta:0.25"
MANY = "#" + "&".join(f"mix=alpha:{i / 100}" for i in range(100, 69, -1))  # long to answer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the file's tests."""
    with running() as one:
        yield one


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Tab]:
    """The page with three columns; what must hold in every test is checked at its end."""
    with tab(browser, served.url, MIXES) as one:
        one.row("alpha").wait_for()
        yield one
        one.check()


def expected(served: Served, mix: Mapping[str, float], n: int = 12, **fields: Any) -> str:
    """What the engine itself answers."""
    messages = [{"role": "user", "content": QUESTION}]
    result = served.engine.generate(messages, adapters=mix, max_tokens=n, temperature=0.0, **fields)
    return result.text


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for what happens outside of the page."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_columns_show_what_the_engine_answers(page: Tab, served: Served) -> None:
    """One question is answered by the base and by each mix, with the text of each alone."""
    page.ask(QUESTION)

    assert page.answer("base") == expected(served, {})
    assert page.answer("alpha") == expected(served, {"alpha": 1.0})
    mixed = page.answer("alpha × 0.5 + beta × 0.25")
    assert mixed == expected(served, {"alpha": 0.5, "beta": 0.25})
    assert len({page.answer("base"), page.answer("alpha"), mixed}) == 3


def test_a_column_tells_what_made_its_answer(page: Tab, served: Served) -> None:
    """Adapters with generation and scale, tokens, speed and cached prompt tokens stand below it."""
    page.ask(QUESTION)
    page.answer("alpha × 0.5 + beta × 0.25")
    page.ask(QUESTION)  # the second time the prompt is found
    column = page.column("alpha × 0.5 + beta × 0.25")
    column.locator("[data-fact=end] dd", has_text="at the limit").wait_for()

    def fact(name: str) -> str:
        return str(column.locator(f"[data-fact='{name}'] dd").inner_text())

    first, second = (served.engine.registry.resolve(name).number for name in ("alpha", "beta"))
    assert fact("made by") == (
        f"alpha × 0.5 (generation {first}), beta × 0.25 (generation {second})"
    )
    assert fact("tokens") == "12"
    n_prompt = int(fact("prompt"))
    assert fact("from cache").startswith(f"{n_prompt - 1} (")
    assert float(fact("tokens/s").replace(",", "")) > 0
    expect(page.column("base").locator("[data-fact='made by'] dd")).to_have_text("the base alone")


def test_a_slider_changes_the_next_answer(page: Tab, served: Served) -> None:
    """Keys on the slider move it, the number and title follow, and the scale is the one used."""
    page.column("alpha").get_by_role("slider", name="Scale of alpha").focus()
    for _ in range(6):
        page.page.keyboard.press("ArrowLeft")
    page.column("alpha × 0.7").wait_for()
    expect(page.page.get_by_label("Scale of alpha as a number").first).to_have_value("0.7")

    page.ask(QUESTION)

    assert page.answer("alpha × 0.7") == expected(served, {"alpha": 0.7})


def test_a_moving_slider_writes_the_address_once(page: Tab) -> None:
    """Browsers limit how often an address changes, so it follows when the slider rests."""
    page.page.evaluate(
        "() => { window.n = 0; const own = history.replaceState.bind(history);"
        " history.replaceState = (...a) => { window.n += 1; own(...a); }; }"
    )
    page.column("alpha").get_by_role("slider", name="Scale of alpha").focus()
    for _ in range(40):
        page.page.keyboard.press("ArrowRight")
        page.page.keyboard.press("ArrowLeft")
    page.page.keyboard.press("ArrowLeft")
    page.page.wait_for_url(re.compile("alpha%3A0.95"))

    assert page.page.evaluate("window.n") < 10


def test_a_number_beyond_the_slider_counts(page: Tab, served: Served) -> None:
    """The field beside a slider takes any scale; what is no number leaves the last one."""
    number = page.page.get_by_label("Scale of alpha as a number").first
    number.fill("-1.5")
    page.column("alpha × -1.5").wait_for()
    number.fill("")
    expect(number).to_have_attribute("aria-invalid", "true")
    number.blur()
    expect(number).to_have_value("-1.5")

    page.ask(QUESTION)

    assert page.answer("alpha × -1.5") == expected(served, {"alpha": -1.5})


def test_mixes_are_composed_and_kept_in_the_address(page: Tab, served: Served) -> None:
    """A new column takes adapters from the dialog; a reload shows the same columns."""
    page.page.get_by_role("button", name="Add a column").click()
    page.page.get_by_label("Search adapters").fill("gam")
    page.page.keyboard.press("Enter")
    column = page.column("gamma")
    column.get_by_role("button", name=re.compile("^Add an adapter")).click()
    page.page.get_by_role("dialog").get_by_role("button", name="beta").click()
    page.column("gamma + beta").wait_for()
    page.column("alpha").get_by_role("button", name=re.compile("^Remove")).click()

    page.page.reload()
    page.row("alpha").wait_for()

    titles = page.page.get_by_role("article").get_by_role("heading").all_inner_texts()
    assert titles == ["base", "alpha × 0.5 + beta × 0.25", "gamma + beta"]
    page.ask(QUESTION)
    assert page.answer("gamma + beta") == expected(served, {"gamma": 1.0, "beta": 1.0})


def test_leaving_the_dialog_takes_the_new_column_back(page: Tab) -> None:
    """Escape in the dialog of a new column leaves the columns as they were."""
    page.page.get_by_role("button", name="Add a column").click()
    page.page.get_by_role("dialog").wait_for()
    page.page.keyboard.press("Escape")

    page.page.get_by_role("dialog").wait_for(state="hidden")
    expect(page.page.get_by_role("article")).to_have_count(3)


def test_stop_ends_the_requests(browser: Browser, served: Served) -> None:
    """Escape ends all answers, here and in the engine; what came so far stays."""
    with tab(browser, served.url, MANY) as page:
        page.row("alpha").wait_for()
        page.ask(QUESTION, max_tokens=450)
        page.page.locator(".column .text", has_text=re.compile(".")).first.wait_for()
        page.page.keyboard.press("Escape")

        page.page.locator("[data-fact=end] dd", has_text="stopped").first.wait_for()
        assert any(page.page.locator(".column .text").all_inner_texts())
        until(lambda: served.engine.stats().core.n_jobs == 0)
        expect(page.page.get_by_role("button", name="Stop")).to_be_disabled()
        page.check()


def test_leaving_the_page_ends_the_requests(browser: Browser, served: Served) -> None:
    """Nothing is computed for a page that is gone."""
    before = served.engine.stats().core.n_aborted
    with tab(browser, served.url, MANY) as one:
        one.row("alpha").wait_for()
        one.ask(QUESTION, max_tokens=450)
        one.page.locator(".column .text", has_text=re.compile(".")).first.wait_for()
        one.page.goto("about:blank")
        until(lambda: served.engine.stats().core.n_jobs == 0)
    assert served.engine.stats().core.n_aborted > before


def test_a_conversation_goes_on(page: Tab, served: Served) -> None:
    """With the box ticked each column builds on its own answer."""
    page.page.locator("#settings-toggle").click()
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.ask(QUESTION)
    first = page.answer("alpha")
    page.page.get_by_label("Continue each conversation").check()
    page.ask("And the sea?")
    page.column("alpha").locator(".asked").wait_for()
    second = page.answer("alpha")

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And the sea?"},
    ]
    result = served.engine.generate(
        messages, adapters={"alpha": 1.0}, max_tokens=12, temperature=0.0
    )
    assert second == result.text


def test_figures_follow_the_engine(page: Tab, served: Served) -> None:
    """Cells, cache hits, tokens served and residency are those of the engine."""
    page.ask(QUESTION)
    page.answer("alpha")
    stats = page.page.locator("#stats")
    total = f"{served.engine.config.n_cells:,}"
    stats.locator(".figure", has_text=f"of {total}").wait_for()
    row = page.row("alpha")
    row.locator(".cell-state", has_text="in memory").wait_for()
    row.locator(".cell-tokens", has_text=re.compile("[1-9]")).wait_for()
    expect(row.locator(".cell-rank")).to_have_text("3")
    (own,) = (one for one in served.engine.adapters if one.name == "alpha")
    assert row.locator(".cell-targets").inner_text() == str(own.n_targets)


def test_an_error_is_shown_in_its_column(browser: Browser, served: Served) -> None:
    """A mix that the server refuses says why; the other columns answer."""
    with tab(browser, served.url, "#mix=nobody&mix=beta") as one:
        one.row("alpha").wait_for()
        one.ask(QUESTION)
        alert = one.column("nobody").get_by_role("alert")
        alert.wait_for()

        assert "no adapter is called 'nobody'" in alert.inner_text()
        assert one.answer("beta") == expected(served, {"beta": 1.0})
        one.check()


def test_a_setting_that_cannot_be_is_not_sent(page: Tab) -> None:
    """A temperature below zero is pointed out, and nothing is asked."""
    page.page.locator("#settings-toggle").click()
    page.page.get_by_label("Temperature").fill("-1")
    page.ask(QUESTION)

    assert page.page.get_by_label("Temperature").evaluate("element => !element.validity.valid")
    expect(page.page.locator(".column .text")).to_have_count(0)


def test_the_keyboard_alone_is_enough(page: Tab, served: Served) -> None:
    """Without a mouse: skip to the question, ask, walk to a slider, see where the focus is."""
    keys = page.page.keyboard
    keys.press("Tab")
    keys.press("Enter")  # the link that skips what is above
    expect(page.page.get_by_label("Question")).to_be_focused()
    keys.type(QUESTION)
    page.page.locator("#settings-toggle").focus()
    keys.press("Enter")
    page.page.get_by_label("Max. tokens").focus()
    keys.press("Control+A")
    keys.type("12")
    page.page.get_by_label("Question").focus()
    keys.press("Enter")
    assert page.answer("alpha") == expected(served, {"alpha": 1.0})

    seen = {}
    for _ in range(60):
        keys.press("Tab")
        name, shown = page.page.evaluate(FOCUS)
        seen[name] = shown
    assert [name for name, shown in seen.items() if not shown] == []
    assert {"Scale of alpha", "Pin alpha", "Unload gamma", "Default scale of beta"} <= seen.keys()


def test_every_control_has_a_name(page: Tab) -> None:
    """No button or field is without a name for assistive technology."""
    page.page.locator("#settings-toggle").click()
    page.page.locator("#load-toggle").click()
    nameless = page.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")]
          .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length))
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Browser, served: Served, scheme: Any) -> None:
    """Text and muted text have a contrast of 4.5 or more to each ground, in both themes."""
    with tab(browser, served.url, MIXES, color_scheme=scheme) as one:
        one.row("alpha").wait_for()
        worst = one.page.evaluate(CONTRAST)
        one.check()
    assert worst >= 4.5


def test_the_switch_overrides_the_system(browser: Browser, served: Served) -> None:
    """Light and dark can be chosen against the system's; the choice outlives a reload."""
    ground = "() => getComputedStyle(document.body).backgroundColor"
    with tab(browser, served.url, color_scheme="light") as one:
        light = one.page.evaluate(ground)
        switch = one.page.get_by_role("button", name=re.compile("^Theme"))
        switch.click()
        assert one.page.evaluate(ground) == light
        switch.click()
        dark = one.page.evaluate(ground)
        assert dark != light
        one.page.reload()
        assert one.page.evaluate(ground) == dark
        one.check()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(browser: Browser, served: Served, width: int) -> None:
    """From a small phone to a laptop the page never scrolls sideways."""
    with tab(browser, served.url, MIXES, viewport={"width": width, "height": 800}) as one:
        one.row("alpha").wait_for()
        one.page.locator("#load-toggle").click()
        one.ask(QUESTION)
        one.answer("alpha")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width
        one.check()


# What has the focus, and whether that is to be seen; the question's is shown by its panel.
FOCUS = """() => {
  const e = document.activeElement;
  if (e === document.body) return ["body", true];
  const panel = e.id === "question" ? getComputedStyle(e.closest(".panel")).boxShadow : "none";
  const shown = getComputedStyle(e).outlineStyle !== "none" || panel !== "none";
  return [e.getAttribute("aria-label") || e.id || e.textContent, shown];
}"""

# The least contrast of the texts' colours to the grounds they stand on, as WCAG computes it.
CONTRAST = """() => {
  const rgb = (color) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (color) => rgb(color)
    .map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return light(getComputedStyle(probe).color);
  };
  let worst = 21;
  const pairs = [];
  for (const text of ["--text", "--muted", "--accent"]) {
    for (const ground of ["--bg", "--surface", "--sunken"]) pairs.push([text, ground]);
  }
  pairs.push(["--bad", "--bad-bg"], ["--on-accent", "--accent"], ["--good", "--surface"]);
  for (const [a, b] of pairs) {
    const [dim, bright] = [colour(a), colour(b)].sort((x, y) => x - y);
    worst = Math.min(worst, (bright + 0.05) / (dim + 0.05));
  }
  probe.remove();
  return worst;
}"""
