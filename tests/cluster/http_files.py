"""A local HTTP server that serves files well or badly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["FileHandler", bytes], None]


class FileHandler(BaseHTTPRequestHandler):
    """Asks the server's `answers` by path (without query) what to do."""

    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        answer = self.server.answers.get(path)
        if answer is None:
            self.reply(404, b"")
        else:
            answer(self, self.server.files.get(path, b""))

    def reply(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        """Status, headers, body; `length`: what Content-Length says, -1 for none."""
        self.send_response(status)
        if length != -1:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_args: object) -> None:
        """Nothing on stderr."""


class FileServer(ThreadingHTTPServer):
    """Remembers the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []

    def add(self, path: str, data: bytes, answer: Answer) -> str:
        """A file; its URL."""
        self.files[path], self.answers[path] = data, answer
        return f"http://127.0.0.1:{self.server_port}{path}"

    def ranges(self, path: str) -> list[str]:
        """The ranges that were asked for, "" for the whole."""
        return [headers.get("Range", "") for at, headers in self.requests if at == path]


@contextmanager
def file_server() -> Iterator[FileServer]:
    """Runs one."""
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def whole(handler: FileHandler, data: bytes) -> None:
    """Ignores ranges."""
    handler.reply(200, data)


def ranged(handler: FileHandler, data: bytes) -> None:
    """Knows ranges, and that its content stays the same."""
    asked = handler.headers.get("Range")
    if asked is None:
        handler.reply(200, data, ETag='"1"')
        return
    start = int(asked.removeprefix("bytes=").rstrip("-"))
    if start >= len(data):
        handler.reply(416, b"", ETag='"1"')
        return
    range_ = f"bytes {start}-{len(data) - 1}/{len(data)}"
    handler.reply(206, data[start:], ETag='"1"', Content_Range=range_)


def cut_first(n_bytes: int, rest: Answer, *, times: int = 1, etag: str = '"1"') -> Answer:
    """The first answers end after n bytes of what they had promised."""
    left = [times]

    def answer(handler: FileHandler, data: bytes) -> None:
        if left[0] > 0:
            left[0] -= 1
            handler.reply(200, data[:n_bytes], len(data), **({"ETag": etag} if etag else {}))
        else:
            rest(handler, data)

    return answer
