"""scripts/bench ray: what Ray Serve costs beside the plain server, per request and streamed token.

Both serve the same base with the same flags from processes of their own: the application of
`loragraph serve` under the event loop and parser that Ray's proxy has (uvloop, httptools), and
`loragraph serve --ray --replicas 1`. They are asked in turn, over connections that stay open:
requests of one token, one stream, and several streams at once. The difference is the way through
proxy, front and router. On a tiny base the engine takes little of it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.servers import CompletionServer

N_CTX = 8192
BODY = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "cache_prompt": True}


class Served(CompletionServer):
    """A server that is ended as its user would, since Ray's processes belong to it."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__([sys.executable, "-m", *words], {}, 0)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    def close(self) -> None:
        """Ends it in order; by force when that takes too long."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        super().close()


def flags(base: Path, n_threads: int) -> list[str]:
    """The same for both."""
    return [
        str(base),
        "-c",
        str(N_CTX),
        "-t",
        str(n_threads),
        "--no-page",
        "--lora-init-without-apply",
    ]


def serve_plain(base: Path, n_threads: int, port: int) -> None:
    """The plain server in this process, under Ray's loop and parser, until a signal."""
    import uvicorn

    import loragraph
    from loragraph.server.app import create_app
    from loragraph.server.config import ServerConfig

    with (
        loragraph.Model.load(base, n_threads=n_threads) as model,
        loragraph.Engine(model, n_ctx=N_CTX, n_threads=n_threads) as engine,
    ):
        app = create_app(engine, ServerConfig(with_page=False))
        uvicorn.run(
            app,
            host="127.0.0.1",
            port=port,
            loop="uvloop",
            http="httptools",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=65,
        )


def request_s(port: int, n: int) -> list[float]:
    """Seconds of each of n requests of one token, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    out = []
    for _ in range(n):
        start = time.perf_counter()
        answer = _asked(connection, n_predict=1)
        answer.read()
        out.append(time.perf_counter() - start)
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}")
    connection.close()
    return out


def stream_s(port: int, n_tokens: int) -> tuple[float, float]:
    """Seconds to the first event of a stream, and from there to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    start = time.perf_counter()
    answer = _asked(connection, n_predict=n_tokens, stream=True)
    events = 0
    first = start
    while line := answer.readline():
        if line.startswith(b"data: "):
            events += 1
            if events == 1:
                first = time.perf_counter()
    end = time.perf_counter()
    connection.close()
    if events < n_tokens:
        raise RuntimeError(f"expected {n_tokens} events, got {events}")
    return first - start, end - first


def burst_s(port: int, n_streams: int, n_tokens: int) -> float:
    """Seconds until streams that began at once have ended."""
    start = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as threads:
        list(threads.map(lambda _: stream_s(port, n_tokens), range(n_streams)))
    return time.perf_counter() - start


def _asked(connection: http.client.HTTPConnection, **fields: Any) -> http.client.HTTPResponse:
    body = json.dumps({**BODY, **fields})
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def measure(ports: dict[str, int], n_rounds: int, n_tokens: int, n_streams: int) -> dict[str, Any]:
    """Medians over rounds in turn, ms."""
    works: dict[str, Callable[[int], list[float]]] = {
        "request": lambda port: request_s(port, 50),
        "first event": lambda port: [stream_s(port, n_tokens)[0] for _ in range(5)],
        "token of one stream": lambda port: [
            stream_s(port, n_tokens)[1] / n_tokens for _ in range(3)
        ],
        f"token of {n_streams} streams": lambda port: [
            burst_s(port, n_streams, n_tokens) / (n_streams * n_tokens)
        ],
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in ports} for name in works
    }
    for number in range(n_rounds + 1):  # the first one only warms
        for name, work in works.items():
            for side in sorted(ports, reverse=bool(number % 2)):
                got = work(ports[side])
                if number:
                    found[name][side].append(1e3 * statistics.median(got))
    return {
        name: {side: statistics.median(values) for side, values in sides.items()}
        for name, sides in found.items()
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="a GGUF file; default: a tiny model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        serve_plain(args.base, args.threads, args.port)
        return
    with ExitStack() as stack:
        base = args.base
        if base is None:
            from tests.tiny import TinyLlama

            folder = stack.enter_context(tempfile.TemporaryDirectory())
            base = Path(folder) / "tiny.gguf"
            TinyLlama(n_ctx_train=4096).write(base)
        plain = ["benchmarks.ray_serve", "--plain", "--base", str(base)]
        plain += ["--threads", str(args.threads)]
        ray = ["loragraph.cli.main", "serve", *flags(base, args.threads), "--ray"]
        servers = {
            "plain": stack.enter_context(Served(plain)),
            "ray": stack.enter_context(Served(ray)),
        }
        ports = {side: server.port for side, server in servers.items()}
        found = measure(ports, args.rounds, args.tokens, args.streams)
    print(f"{base.name}, {args.threads} threads; ms, medians of {args.rounds} rounds")
    print(f"{'':<24}{'plain':>10}{'ray':>10}{'more':>10}")
    for name, sides in found.items():
        more = sides["ray"] - sides["plain"]
        print(f"{name:<24}{sides['plain']:>10.3f}{sides['ray']:>10.3f}{more:>10.3f}")


if __name__ == "__main__":
    main()
