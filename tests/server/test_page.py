"""The page's files and headers, without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources

import httpx2 as httpx
import pytest

from loragraph.server.config import ServerConfig
from loragraph.server.page import assets
from tests.server.serving import Served, serving, write_files

NAMES = sorted(assets())


@pytest.mark.parametrize("path", ["/", "/index.html", *(f"/static/{name}" for name in NAMES)])
def test_each_file_comes_with_its_type_and_headers(http: httpx.Client, path: str) -> None:
    """Type, a policy that allows this origin alone, and no guessing of types."""
    answer = http.get(path)

    assert answer.status_code == 200
    ending = path.rpartition(".")[2] if "." in path else "html"
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    assert answer.headers["content-type"].partition(";")[0] == types[ending]
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"


def test_a_file_that_is_known_is_not_sent_again(http: httpx.Client) -> None:
    """The etag of a file, in any of the header's forms, is answered with 304 and no body."""
    first = http.get("/static/main.js")
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = http.get("/static/main.js", headers={"If-None-Match": known})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == etag
    assert (
        http.get("/static/main.js", headers={"If-None-Match": '"other"'}).content == first.content
    )


def test_head_has_the_headers_of_get(http: httpx.Client) -> None:
    """HEAD answers with the length and etag, and without a body."""
    got, head = http.get("/"), http.head("/")

    assert head.content == b""
    for name in ("content-length", "etag", "content-type", "content-security-policy"):
        assert head.headers[name] == got.headers[name]


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/nope.js",
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static//etc/passwd",
        "/static/main.js%00",
    ],
)
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    """Other names, and ways out of the folder, are 404 in the shape of errors."""
    answer = http.get(path)

    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


class _References(HTMLParser):
    """What a document refers to, and what stands in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        for name, value in attrs:
            if name in ("src", "href"):
                self.found.append(value or "")
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


def test_the_page_refers_to_its_own_files_alone(http: httpx.Client) -> None:
    """Each reference is a file that is served; nothing is inline; each module is imported."""
    parser = _References()
    parser.feed(http.get("/").text)
    files = [name for name in parser.found if not name.startswith("#")]

    assert parser.inline == []
    assert all(http.get(f"/{name}").status_code == 200 for name in files)
    imported = {"main.js", "theme.js", "index.html", "icon.svg", "style.css", "parts.css"}
    for name in NAMES:
        text = http.get(f"/static/{name}").text
        if name.endswith(".js"):
            imported.update(re.findall(r'from "\./([^"]+)"', text))
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"@import|url\(", text), name
    assert imported == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_no_script_makes_markup_of_text(name: str) -> None:
    """No script uses what parses HTML or runs text; the policy would stop it as well."""
    text = assets()[name].content.decode()

    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text
    )


def test_the_files_are_package_data() -> None:
    """All files of the folder are known types, so nothing in it is left unserved."""
    folder = resources.files("loragraph.server").joinpath("static")

    assert sorted(file.name for file in folder.iterdir()) == NAMES


def test_the_page_needs_no_key_and_its_routes_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With keys set the files are open, so that the key can be entered; the figures are not."""
    folder = tmp_path_factory.mktemp("keys")
    write_files(folder)
    with serving(folder, ServerConfig(api_keys=("secret",))) as one, one.client() as http:
        assert http.get("/").status_code == 200
        assert http.get("/static/main.js").status_code == 200
        assert http.get("/favicon.ico").status_code == 200
        assert http.get("/api/state").status_code == 401
        assert http.post("/api/compare", json={"requests": [{}]}).status_code == 401
        with one.client("secret") as known:
            assert known.get("/api/state").status_code == 200


def test_a_server_may_have_no_page(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without the page its files and routes do not exist."""
    config = ServerConfig(with_page=False)
    with serving(served.folder, config) as one, one.client() as http:
        for path in ("/", "/static/main.js", "/api/state"):
            assert http.get(path).status_code == 404
