"""Set up before any test imports numpy."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

# Products of tiny matrices: threads of BLAS would spend their time waiting for each other.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A shell's background job ignores Ctrl-C and hands that on to the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that name no seed get fixed ones, so no test depends on what is drawn."""
    seeds = itertools.count(int(os.environ.get("LORAGRAPH_TEST_SEED", "1")))
    monkeypatch.setattr("loragraph.engine.sampler.draw_seed", lambda: next(seeds))
