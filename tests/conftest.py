"""Set up before any test imports numpy."""

from __future__ import annotations

import os

# Products of tiny matrices: threads of BLAS would spend their time waiting for each other.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
