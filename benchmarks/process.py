"""Measurements that need a process of their own, and engines that live in one.

`python -m benchmarks.process load …` loads one engine once and reports seconds and memory;
`python -m benchmarks.process serve …` runs rounds on request, one JSON line each way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sides import CLOCKS, Round, Settings, Side, SideName, open_side, prepare

PREFILL, DECODE = 512, 64


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Seconds until model and context stand; bytes that loading and running them added."""

    load_s: float
    loaded_bytes: int  # resident memory added by model and context
    used_bytes: int  # the same after a prefill of 512 and 64 decodes


def measure_load(
    name: SideName, base: Path, prompt: Sequence[int], settings: Settings
) -> LoadResult:
    """One load in a fresh process."""
    job = _job(name, base, None, settings) | {"prompt": list(prompt)}
    done = subprocess.run(
        [*_COMMAND, "load"], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    return LoadResult(**json.loads(done.stdout))


class RemoteSide:
    """An engine in a process of its own; it sleeps while it has no turn."""

    def __init__(
        self, name: SideName, base: Path, adapter: Path | None, settings: Settings
    ) -> None:
        self._process = subprocess.Popen(
            [*_COMMAND, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(_job(name, base, adapter, settings))

    def use_adapter(self, on: bool) -> None:
        self._ask({"use_adapter": on})

    def round(self, prompt: Sequence[int], n_decode: int) -> Round:
        return Round(**self._ask({"prompt": list(prompt), "n_decode": n_decode}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the engine's process ended with {process.wait()}")
        return dict(json.loads(answer))


_COMMAND = [sys.executable, "-m", "benchmarks.process"]


def _job(name: SideName, base: Path, adapter: Path | None, settings: Settings) -> dict[str, Any]:
    return {
        "name": name,
        "base": str(base),
        "adapter": None if adapter is None else str(adapter),
        "settings": asdict(settings),
    }


def _open(job: dict[str, Any], settings: Settings) -> Side:
    adapter = None if job["adapter"] is None else Path(job["adapter"])
    return open_side(job["name"], Path(job["base"]), adapter, settings)


def _load() -> None:
    job = json.loads(sys.stdin.read())
    settings = Settings(**job["settings"])
    now = CLOCKS[settings.clock]
    prepare()
    before, start = _resident_bytes(), now()
    side = _open(job, settings)
    seconds, loaded = now() - start, _resident_bytes()
    side.round(job["prompt"], DECODE)
    used = _resident_bytes()
    side.close()
    print(json.dumps(asdict(LoadResult(seconds, loaded - before, used - before))))


def _serve() -> None:
    job = json.loads(sys.stdin.readline())
    prepare()
    side = _open(job, Settings(**job["settings"]))
    _answer({})
    for line in sys.stdin:
        message = json.loads(line)
        if "use_adapter" in message:
            side.use_adapter(message["use_adapter"])
            _answer({})
        else:
            _answer(asdict(side.round(message["prompt"], message["n_decode"])))
    side.close()


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _resident_bytes() -> int:
    """Resident memory now, shared pages of mapped files included; where /proc is missing, the
    largest so far."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    import resource  # no such module on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    {"load": _load, "serve": _serve}[sys.argv[1]]()
