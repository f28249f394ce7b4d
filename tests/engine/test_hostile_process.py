"""What can only be tried in a process of its own: a fork, and too little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TinyAdapter, TinyLlama

FORK = """
import os, sys
from loragraph import Context, Model
from loragraph.errors import LifecycleError

with Model.load(sys.argv[1], n_threads=2) as model, Context(model, n_ctx=64) as ctx:
    first = ctx.decode([1, 2, 3])
    pid = os.fork()
    if pid == 0:
        answer = 1
        try:
            ctx.decode([4])
        except LifecycleError as error:
            answer = 0 if "forked" in str(error) else 2
        try:
            Context(model)
            answer = 3
        except LifecycleError:
            pass
        ctx.close()
        model.close()
        os._exit(answer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ctx.clear()
    assert (ctx.decode([1, 2, 3]) == first).all()
"""

MEMORY = """
import resource, sys
from pathlib import Path
from loragraph import Context, LoragraphError, Model

base, adapter, step = sys.argv[1], sys.argv[2], int(sys.argv[3])

def life():
    with Model.load(base, n_threads=1) as model:
        yield "adapter"
        loaded = model.load_adapter(adapter)
        yield "context"
        with Context(model, n_ctx=4096) as ctx:
            yield "decode"
            ctx.set_adapters({loaded: 1.0})
            ctx.decode([1] * 8)
            ctx.decode([1] * 600)
            yield "end"

list(life())  # everything that is loaded once
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def limit(n_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (in_use + n_bytes, resource.RLIM_INFINITY))

stages = set()
for n_bytes in range(0, 96 << 20, step << 10):
    limit(n_bytes)
    stage = "load"
    try:
        for stage in life():
            pass
    except LoragraphError as error:
        stage = f"{stage}: no memory"
    limit(1 << 30)
    stages.add(stage)
print(*sorted(stages), sep="\\n")
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script as a program of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_use_in_a_forked_process(tmp_path: Path) -> None:
    """A forked process gets an error instead of waiting for threads that it does not have."""
    path = TinyLlama(n_layer=1).write(tmp_path / "base.gguf")
    done = run(FORK, path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_memory_ends_anywhere(tmp_path: Path) -> None:
    """With any amount of memory left there is an error or a result, and the next try starts anew.

    A wide feed-forward layer makes the step's work memory large: ggml would end the process there.
    """
    model = TinyLlama(n_layer=1, n_ff=6400)
    base = model.write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "adapter.gguf", model)
    done = run(MEMORY, base, tmp_path / "adapter.gguf", 4001)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"context: no memory", "end"} <= set(done.stdout.split("\n"))
