"""Spoiled adapter files: only LoragraphError comes out, and the process lives."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.adapter_fuzz import run
from tests.fuzz.mutations import KINDS, Change, corpus, mutate
from tests.fuzz.worker import Worker

CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from(KINDS),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 2**32 - 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One child process for all cases."""
    with Worker() as made:
        yield made


@pytest.mark.parametrize("i", range(len(corpus())))
def test_corpus_is_read_before_it_is_spoiled(worker: Worker, tmp_path: Path, i: int) -> None:
    """The adapters load, so that the fuzz starts behind the checks and not in front of them."""
    path = tmp_path / "a.gguf"
    path.write_bytes(corpus()[i])
    is_base = i == len(corpus()) - 1
    assert worker.check(path) == ("ok AdapterFormatError" if is_base else "ok loaded")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(corpus()), CHANGES)
def test_spoiled_file(
    worker: Worker, tmp_path_factory: pytest.TempPathFactory, data: bytes, changes: list[Change]
) -> None:
    """Whatever is changed, the answer is an adapter or a LoragraphError, in bounded memory."""
    path = tmp_path_factory.getbasetemp() / "spoiled.gguf"
    path.write_bytes(mutate(data, changes))
    answer = worker.check(path)
    assert answer.startswith("ok"), answer


def test_long_run_script(tmp_path: Path) -> None:
    """A short piece of the long run finds nothing."""
    counts, findings = run(150, 1, tmp_path)
    assert findings == []
    assert counts.total() == 150


def test_worker_notices_a_crash(worker: Worker, tmp_path: Path) -> None:
    """A child that dies is a finding, not a pass, and the next case has a new child."""
    worker._child.kill()
    worker._child.wait()
    path = tmp_path / "a.gguf"
    path.write_bytes(corpus()[0])
    assert worker.check(path).startswith("BUG")
    assert worker.check(path) == "ok loaded"


def test_count_that_promises_gigabytes(worker: Worker, tmp_path: Path) -> None:
    """A wrong count in a file of 20 GB (a hole) is refused without reading or allocating them."""
    path = tmp_path / "hole.gguf"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 10**9)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(20 << 30)
    assert worker.check(path) == "ok GGUFError"


def test_slow_and_hanging_children_are_findings(tmp_path: Path) -> None:
    """Both in processor time: a machine that is busy otherwise makes no finding."""
    folder = tmp_path / "children"
    folder.mkdir()
    (folder / "slow_child.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from tests.fuzz import worker\n"
        "def check(path: Path) -> str:\n"
        "    seconds, start = float(path.name), time.process_time()\n"
        "    while time.process_time() - start < seconds:\n"
        "        pass\n"
        "    return 'ok'\n"
        "worker.SLOW_S, worker.HANG_S = 0.2, 1\n"
        "worker.serve(check)\n"
    )
    with Worker("slow_child", folder) as child:
        assert child.check(Path("0")) == "ok"
        assert child.check(Path("0.4")) == "BUG: more than 0.2 s"
        assert child.check(Path("60")) == f"BUG: the process ended with status {-signal.SIGPROF}"
        assert child.check(Path("0")) == "ok"
