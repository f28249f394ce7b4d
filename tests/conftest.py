"""Set up before any test imports numpy."""

from __future__ import annotations

import os
import signal

# Products of tiny matrices: threads of BLAS would spend their time waiting for each other.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A shell's background job ignores Ctrl-C and hands that on to the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
