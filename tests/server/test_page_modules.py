"""The page's pure functions, called in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.browser import Tab, running, tab
from tests.server.serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the file's tests."""
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Tab]:
    """The page, whose modules are there to be imported."""
    with tab(browser, served.url) as one:
        yield one


def call(page: Tab, module: str, body: str, *arguments: Any) -> Any:
    """The value of a function's body in which `m` is a module and `a` are the arguments."""
    script = f"async (a) => {{ const m = await import('/static/{module}.js'); {body} }}"
    return page.page.evaluate(script, list(arguments))


EVENTS = (
    ": ping\n\ndata: one\n\ndata:two\r\ndata: three\r\n\r\n"
    "event: x\nid: 1\ndata: \n\ndata: é🙂\n\ndata: cut"
)


def test_events_are_found_however_the_text_is_cut(page: Tab) -> None:
    """One piece, two pieces at every place, and single characters give the same events."""
    found = call(
        page,
        "sse",
        """const [text] = a;
        const read = (pieces) => {
          const reader = new m.EventReader();
          return pieces.flatMap((piece) => [...reader.push(piece)]);
        };
        const all = [read([text]), read([...text])];
        for (let i = 0; i <= text.length; i++) all.push(read([text.slice(0, i), text.slice(i)]));
        return [...new Set(all.map((one) => JSON.stringify(one)))];""",
        EVENTS,
    )
    assert found == ['["one","two\\nthree","","é🙂"]']


@pytest.mark.parametrize("piece", ["x", "data: x\\n"])
def test_what_never_ends_is_given_up(page: Tab, piece: str) -> None:
    """A line or an event without an end is an error, not memory without an end."""
    error = call(
        page,
        "sse",
        f"""const reader = new m.EventReader();
        const piece = "{piece}".repeat(100_000);
        try {{
          for (let i = 0; i < 400; i++) for (const _ of reader.push(piece)) return "an event";
        }} catch (error) {{ return error.name; }}
        return "no error";""",
    )
    assert error == "RangeError"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 12345, "12,345"),
        ("count", None, "–"),
        ("count", "<b>", "–"),
        ("rate", 0, "0.0"),
        ("rate", 9.96, "10.0"),
        ("rate", 99.96, "100"),
        ("scale", 1, "1"),
        ("scale", 0.6000000238, "0.6"),
        ("scale", -0.25, "-0.25"),
        ("seconds", 0.0843, "84 ms"),
        ("seconds", 0.9999, "1.0 s"),
        ("seconds", 12.34, "12.3 s"),
        ("bytes", 0, "0 B"),
        ("bytes", 1023, "1.0 KiB"),
        ("bytes", 3686400, "3.5 MiB"),
        ("bytes", 2**40, "1.0 TiB"),
        ("bytes", None, "–"),
    ],
)
def test_numbers(page: Tab, name: str, value: Any, text: str) -> None:
    """Numbers as people read them; a dash for what is none."""
    assert call(page, "format", "return m[a[0]](a[1])", name, value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1, 3, "33 %"), (0, 5, "0 %"), (0, 0, "–"), (2, 2, "100 %")]
)
def test_percent(page: Tab, part: int, whole: int, text: str) -> None:
    """A share; a dash of nothing."""
    assert call(page, "format", "return m.percent(a[0], a[1])", part, whole) == text


@pytest.mark.parametrize(
    "mix",
    [[], [["a", 1]], [["a,b:c", -0.5], ["é🙂&=#%", 1e-7]], [["<img>", 0], ["__proto__", 1.25]]],
)
def test_a_mix_survives_the_address(page: Tab, mix: list[Any]) -> None:
    """What is written into the address is read from it again."""
    body = "return m.parseMix(m.formatMix(a[0]))"
    assert call(page, "columns", body, mix) == mix


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("1", 1),
        ("-0.5", -0.5),
        ("", None),
        (" ", None),
        ("x", None),
        ("1e9", None),
        ("Infinity", None),
    ],
)
def test_a_scale_is_a_number_within_bounds(page: Tab, text: str, scale: float | None) -> None:
    """What is no number, or beyond a hundred, is no scale."""
    assert call(page, "mix", "return m.parseScale(a[0])", text) == scale


def test_the_rate_is_that_of_the_last_seconds(page: Tab) -> None:
    """Older samples do not count, and one sample is no rate."""
    samples = [{"time_s": t, "n": n} for t, n in [(0, 0), (1, 100), (2, 110), (5, 140)]]

    assert call(page, "stats", "return m.recentRate(a[0], 'n')", samples) == 10
    assert call(page, "stats", "return m.recentRate(a[0], 'n')", samples[:1]) is None
    assert call(page, "stats", "return m.recentRate(a[0], 'n')", []) is None
    assert call(page, "stats", "return m.rates(a[0], 'n')", samples) == [100, 10, 10]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no", "code": 400}}, "no"),
        ({"error": "no"}, "no"),
        ({"detail": [{"msg": "a"}, {"msg": "b"}, {}]}, "a; b"),
        ({"message": "no"}, "no"),
        ({"error": {}}, None),
        ({}, None),
        (None, None),
        ([], None),
        ("text", None),
    ],
)
def test_the_servers_words_are_found(page: Tab, body: Any, message: str | None) -> None:
    """Errors of all the shapes in use give their message."""
    assert call(page, "api", "return m.messageOf(a[0])", body) == message
