"""S3 on this machine: moto's, with what goes wrong at real ones put before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

REASON = "s3fs and moto[server] are not installed (CONTRIBUTING.md)"
REGION = "us-east-1"
Start = Callable[[str, list[tuple[str, str]]], object]
Answer = Callable[["Request"], int]
"""What to do before a request is served: a status to answer with, or 0."""


@dataclass(frozen=True)
class Request:
    """One that came."""

    method: str
    path: str
    range: str  # "" for none
    key: str  # of the credentials


@dataclass
class S3Server:
    """Remembers the requests that read objects; `answer` may refuse them."""

    app: Any
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    answer: Answer = lambda _request: 0

    def __call__(self, env: dict[str, Any], start: Start) -> Iterable[bytes]:
        """As WSGI has it."""
        key = env.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        request = Request(env["REQUEST_METHOD"], env["PATH_INFO"], env.get("HTTP_RANGE", ""), key)
        if request.method in ("GET", "HEAD") and key != "owner":
            self.requests.append(request)
            if status := self.answer(request):
                start(f"{status} No", [("Content-Length", "0")])
                return []
        served: Iterable[bytes] = self.app(env, start)
        return served

    def storage(self, key: str = "reader", secret: str = "secret") -> dict[str, Any]:
        """fsspec's options for it; what fails is tried once, as ours are the tries that count."""
        return {
            "endpoint_url": self.url,
            "key": key,
            "secret": secret,
            "client_kwargs": {"region_name": REGION},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }

    def client(self, service: str = "s3") -> Any:
        """boto3's, of the owner."""
        boto3 = pytest.importorskip("boto3", reason=REASON)
        return boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id="owner",
            aws_secret_access_key="secret",
            region_name=REGION,
        )

    def ranges(self, path: str) -> list[str]:
        """What was read of an object."""
        return [r.range for r in self.requests if r.path == path and r.method == "GET"]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs one, with an empty bucket `box`."""
    pytest.importorskip("s3fs", reason=REASON)
    moto = pytest.importorskip("moto.moto_server.werkzeug_app", reason=REASON)
    serving = pytest.importorskip("werkzeug.serving", reason=REASON)

    class Quiet(moto.MotoRequestHandler):  # type: ignore[misc,name-defined]
        def log(self, *_args: object) -> None:
            """Nothing on stderr."""

    server = S3Server(moto.DomainDispatcherApplication(moto.create_backend_app))
    http = serving.make_server("127.0.0.1", 0, server, threaded=True, request_handler=Quiet)
    server.url = f"http://127.0.0.1:{http.port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        server.client().create_bucket(Bucket="box")
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
