"""llama-server beside the engine: its own server code, through the package xllamacpp.

Run as a script, by a Python that has xllamacpp (a prebuilt llama.cpp; it need not have loragraph),
it serves one base and adapters and answers lines of JSON: a round of requests in, seconds out. The
class `PeerServer` is the other end. One process at a time, so that idle servers cost nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TOKENS_PER_SLOT = 256  # of context: a prompt and what is generated fit


class PeerServer:
    """A llama-server process with `n_slots` slots, unified KV or not; adapters by number."""

    def __init__(
        self,
        python: Path,
        base: Path,
        adapters: Sequence[Path],
        *,
        n_slots: int,
        n_threads: int,
        unified: bool,
    ) -> None:
        settings = {
            "base": str(base),
            "adapters": [str(path) for path in adapters],
            "n_slots": n_slots,
            "n_threads": n_threads,
            "unified": unified,
        }
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).resolve()), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()  # ready

    def seconds(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], n_tokens: int
    ) -> float:
        """Seconds until requests sent at once are answered; RuntimeError where one is short."""
        assert self._process.stdin is not None
        order = {"prompts": list(prompts), "adapters": list(adapters), "n_tokens": n_tokens}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer["n_tokens"] != [n_tokens] * len(prompts):
            raise RuntimeError(f"llama-server gave {answer['n_tokens']} tokens")
        return float(answer["seconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        """The next line of JSON; whatever else the library prints is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("llama-server ended")


def _serve(settings: dict[str, Any]) -> None:
    import xllamacpp  # type: ignore[import-not-found]  # in the peer's environment alone

    params = xllamacpp.CommonParams()
    params.model.path = settings["base"]
    params.n_parallel = settings["n_slots"]
    params.n_ctx = TOKENS_PER_SLOT * settings["n_slots"]
    params.kv_unified = settings["unified"]
    params.cpuparams.n_threads = settings["n_threads"]
    params.cpuparams_batch.n_threads = settings["n_threads"]
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(p, 1.0) for p in settings["adapters"]]
    server = xllamacpp.Server(params)
    _say({"ready": True})
    n_adapters = len(settings["adapters"])
    for line in sys.stdin:
        order = json.loads(line)
        counts: list[int] = [0] * len(order["prompts"])

        def ask(i: int, order: dict[str, Any] = order, counts: list[int] = counts) -> None:
            on = order["adapters"][i]
            # Every adapter is named: one that is not listed is off, but an empty list is "default".
            lora = [{"id": k, "scale": float(k == on)} for k in range(n_adapters)]
            request = {
                "prompt": order["prompts"][i],
                "n_predict": order["n_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "lora": lora,
            }
            answer = server.handle_completions(request)
            counts[i] = int(answer["usage"]["completion_tokens"])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(counts))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _say({"seconds": time.perf_counter() - start, "n_tokens": counts})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
