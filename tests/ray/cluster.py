"""A local cluster of tiny models, for tests: Ray on loopback, two replicas behind one front."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from loragraph.ray.options import AdapterArg, AppArgs
from tests.server.serving import ADAPTERS


@dataclass(frozen=True)
class Front:
    """A running front."""

    url: str
    args: AppArgs
    replicas: Any  # their handle

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        """An HTTP client for it."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def table(self) -> dict[str, dict[str, Any]]:
        """GET /replicas, by id."""
        with self.client() as http:
            return {one["id"]: one for one in http.get("/replicas").json()["replicas"]}

    def metric(self, name: str, path: str = "/metrics") -> float:
        """The sum of a metric's samples."""
        with self.client() as http:
            lines = http.get(path).text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found)


def app_args(folder: Path, **more: Any) -> AppArgs:
    """For the files of tests.server.serving.write_files()."""
    options: dict[str, Any] = {
        "base": folder / "base.gguf",
        "adapters": tuple(
            AdapterArg(name=name, source=str(folder / "adapters" / f"{name}.gguf"))
            for name in ADAPTERS
        ),
        "lora_dir": folder / "adapters",
        "catalogue_dir": folder / "catalogue",
        "cache_dir": folder / "cache",
        "ctx_size": 1024,
        "parallel": 8,
        "threads": 1,
        "cpus_per_replica": 0,
        "replicas": 2,
        "metrics": True,
        "report_interval": 0.2,
        **more,
    }
    return AppArgs(**options)


def free_port() -> int:
    """A port of the loopback address that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds; fails if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)


@contextmanager
def front(
    folder: Path,
    *,
    beside: Front | None = None,
    name: str = "loragraph",
    route_prefix: str = "/",
    **more: Any,
) -> Iterator[Front]:
    """Deploys an application in the running cluster; `beside`: one that runs there already."""
    from loragraph.ray import local

    args = app_args(folder, **more)
    port = free_port() if beside is None else int(beside.url.rpartition(":")[2])
    listen = local.Listen("127.0.0.1", port)
    with local.running(args, listen, name=name, route_prefix=route_prefix) as replicas:
        yield Front(f"http://127.0.0.1:{port}{route_prefix.rstrip('/')}", args, replicas)


def completion(http: httpx.Client, model: str, n: int = 8, **fields: Any) -> Mapping[str, Any]:
    """A greedy completion's answer."""
    body = {"prompt": "hello", "model": model, "max_tokens": n, "temperature": 0, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: Mapping[str, Any] = answer.json()
    return found


def text_of(http: httpx.Client, model: str, n: int = 8, **fields: Any) -> str:
    """Its text."""
    return str(completion(http, model, n, **fields)["choices"][0]["text"])
