"""Reads files named on stdin, in a process of its own; this one with all that reads adapters.

Answers one line a file: "ok …" or "BUG …". A crash, a hang or an allocation beyond the limit shows
as a missing answer, so it cannot pass unnoticed.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

MEMORY_BYTES = 1 << 30  # address space beyond what the libraries take
SLOW_S = 5.0  # of processor time: what else runs on the machine is no finding
HANG_S = 30  # of processor time, in C code too
SLEEP_S = 600  # of the clock, for what waits and computes nothing


class Worker:
    """The other end: a child process that is restarted after it died."""

    def __init__(self, module: str = "tests.fuzz.worker", folder: Path | None = None) -> None:
        """`module` is what the child runs, from `folder` too: its main calls `serve`."""
        self._module = module
        paths = [*filter(None, sys.path), *([] if folder is None else [str(folder)])]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._child = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.communicate()

    def check(self, path: Path) -> str:
        """The worker's answer about one file; "BUG …" where it died or took too long."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):  # it died before: then there is no answer either
            self._child.stdin.write(f"{path}\n")
            self._child.stdin.flush()
        answer = self._child.stdout.readline().strip()
        if not answer:
            status = self._child.wait()
            self._child.communicate()
            self._child = self._start()
            return f"BUG: the process ended with status {status}"
        return answer

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._env,
        )


def serve(check: Callable[[Path], str]) -> None:
    """The child's loop: the answer of `check` about each file named on stdin, until that ends."""
    logging.getLogger().addHandler(logging.NullHandler())
    if sys.platform == "linux":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        # The default action of both ends the process, inside C code too.
        signal.setitimer(signal.ITIMER_PROF, HANG_S)
        signal.alarm(SLEEP_S)
        start = time.process_time()
        try:
            answer = check(Path(line.removesuffix("\n")))
        except Exception:  # noqa: BLE001 - whatever comes is the finding
            answer = "BUG: " + " | ".join(traceback.format_exc().splitlines()[-6:])
        if time.process_time() - start > SLOW_S:
            answer = f"BUG: more than {SLOW_S} s"
        sys.stdout.write(" ".join(answer.split()) + "\n")
        sys.stdout.flush()


def main() -> None:
    """The child that reads adapters."""
    from loragraph.adapters.gguf import check_adapter, read_adapter
    from loragraph.errors import LoragraphError
    from loragraph.ggml.lib import load_library
    from loragraph.tools.inspect import inspect_file
    from tests.adapters.raw_gguf import base

    lib, bases = load_library(), (base(), base(tied=True))

    def check(path: Path) -> str:
        answer = "ok loaded"
        try:
            problems = [check_adapter(lib, path, each) for each in (*bases, None)]
            for each, found in zip(bases, problems, strict=False):
                try:
                    read_adapter(lib, path, each).close()
                    if found:
                        answer = f"BUG: loaded in spite of {found[0]!r}"
                except LoragraphError as error:
                    if not answer.startswith("BUG"):
                        answer = f"ok {type(error).__name__}"
                    if not found or str(found[0]) != str(error):
                        answer = f"BUG: check found {found[:1]!r}, read {error!r}"
            inspect_file(lib, path)
        except LoragraphError:
            pass
        return answer

    serve(check)


if __name__ == "__main__":
    main()
