"""A merge as a process: what it needs of memory, and what an interruption leaves behind."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from loragraph.tools.merge import merge
from tests.gguf_bytes import Value, gguf_bytes, tensor

N_IN, N_OUT, N_TENSORS = 1024, 1024, 64
NAMES = [f"blk.{il}.attn_q.weight" for il in range(N_TENSORS)]


def sparse_base(path: Path) -> Path:
    """An F32 model of 256 MB that takes no disk: all of its weights are holes."""
    nbytes = 4 * N_IN * N_OUT
    head = b"GGUF" + struct.pack("<IQQ", 3, N_TENSORS, 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("llama.block_count") + struct.pack("<II", 4, N_TENSORS)
    for i, name in enumerate(NAMES):
        head += text(name) + struct.pack("<IQQIQ", 2, N_IN, N_OUT, 0, i * nbytes)
    head += bytes(-len(head) % 32)
    path.write_bytes(head)
    os.truncate(path, len(head) + N_TENSORS * nbytes)
    return path


def text(value: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(value)) + value.encode()


def adapter(path: Path) -> Path:
    """A rank 1 adapter of every tensor of the sparse base."""
    keys: dict[str, Value] = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 1.0,
    }
    halves = [
        tensor(f"{name}.{half}", np.ones(shape))
        for name in NAMES
        for half, shape in (("lora_a", (1, N_IN)), ("lora_b", (N_OUT, 1)))
    ]
    path.write_bytes(gguf_bytes(keys, halves))
    return path


def test_peak_memory_is_a_few_tensors(tmp_path: Path) -> None:
    """At most three times the largest tensor and 200 MB, for a model larger than that."""
    base, lora = sparse_base(tmp_path / "base.gguf"), adapter(tmp_path / "a.gguf")
    program = """
        import json, sys
        from benchmarks.memory import peak_bytes
        from loragraph.tools.merge import merge
        merge(sys.argv[1], {sys.argv[2]: 1.0}, sys.argv[3], type="f16", n_threads=2)
        print(json.dumps(peak_bytes()))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    command += map(str, (base, lora, tmp_path / "out.gguf"))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    largest = 4 * N_IN * N_OUT
    bound = 3 * largest + 200 * 10**6
    assert base.stat().st_size > bound  # so reading all of it would fail
    assert json.loads(done.stdout) < bound
    with (tmp_path / "out.gguf").open("rb") as file:
        file.seek(-2 * N_IN * N_OUT, os.SEEK_END)
        assert set(np.frombuffer(file.read(), np.float16).tolist()) == {1.0}


def interrupted(number: signal.Signals, folder: Path) -> tuple[int, bytes]:
    """Sends a signal to a merge that is writing; gives its status and what it printed."""
    base, lora = sparse_base(folder / "base.gguf"), adapter(folder / "a.gguf")
    # A long merge: K-quants take time.
    command = [sys.executable, "-m", "loragraph.cli.main", "merge", str(base), "--lora", str(lora)]
    process = subprocess.Popen(
        [*command, "-o", str(folder / "out.gguf"), "--type", "iq4_nl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob(".*.part")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (folder / "out.gguf").exists()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_mid_write(number: signal.Signals, tmp_path: Path) -> None:
    """No file stands under the final name, nor under another; the status is the signal's."""
    status, errors = interrupted(number, tmp_path)
    assert status == 128 + number
    assert b"Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "base.gguf"]


def test_killed_in_mid_write(tmp_path: Path) -> None:
    """Who cannot clean up leaves nothing under the final name; the next merge is not hindered."""
    status, _ = interrupted(signal.SIGKILL, tmp_path)
    assert status == -signal.SIGKILL
    assert not (tmp_path / "out.gguf").exists()
    merge(tmp_path / "base.gguf", {tmp_path / "a.gguf": 1.0}, tmp_path / "out.gguf", type="q8_0")
    whole = (tmp_path / "out.gguf").stat().st_size
    assert whole > N_TENSORS * N_IN * N_OUT  # a byte a value and more
