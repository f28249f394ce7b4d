"""Choosing from a row of logits in C (sampling.h): a scan, the best k, masses and draws.

In: rows of logits and bounds. Out: token ids. What the bounds mean, the callers know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.library import ffi, lib, pointer

Logits = NDArray[np.float32]

MASS_ERROR = float(lib.loragraph_row_mass_error())
"""Relative error of masses that are not exact."""

LOWEST = -math.inf
HIGHEST = math.inf


class LogitRow:
    """One row of logits at a time, (n,) f32 in one piece, and what was found in it.

    Bounds are exclusive: a window holds the tokens with lo < logit < hi. Their weights are
    exp(logit / temperature - peak / temperature), with `peak` the largest of them.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._maxima = ffi.new("float[]", lib.loragraph_row_blocks(n))
        self._sums = ffi.new("double[]", lib.loragraph_draw_blocks(n))
        self._mass = ffi.new("double *")
        self._scan = ffi.new("row_scan *")
        self._window = ffi.new("row_window *", {"n": n})
        self._x: Any = ffi.NULL

    def read(self, logits: Logits) -> None:
        """Scans (n,) f32, which is borrowed until the next call."""
        self._x = ffi.from_buffer("float[]", logits)
        self._window.x = self._x
        lib.loragraph_row_scan(self._x, self._n, self._maxima, self._scan)

    def changed(self, ids: NDArray[np.int64]) -> None:
        """To be called when the values at these ids, (n,) i64, are others than in `read`."""
        where = ffi.from_buffer("int64_t[]", ids)
        lib.loragraph_row_rescan(self._x, self._n, where, len(ids), self._maxima, self._scan)

    @property
    def finite(self) -> bool:
        """Whether all values were finite in `read`; the rest means nothing if not."""
        return bool(self._scan.finite)

    @property
    def max(self) -> float:
        """The largest value."""
        return float(self._scan.max)

    @property
    def best(self) -> int:
        """The lowest id of the largest value."""
        return int(self._scan.best)

    def top(self, k: int) -> NDArray[np.int64]:
        """Ids of the `k` largest, best first, the lower id among equals; at most all."""
        k = min(k, self._n)
        ids = np.empty(k, np.int64)
        heap = ffi.new("row_candidate[]", k)
        into = ffi.from_buffer("int64_t[]", ids)
        return ids[: lib.loragraph_row_top(self._x, self._n, self._maxima, k, heap, into)]

    def mass(self, lo: float = LOWEST, hi: float = HIGHEST, *, exact: bool = False) -> float:
        """Sum of the weights at temperature 1 and the row's own maximum."""
        return float(lib.loragraph_row_mass(self._bounds(lo, hi), exact))

    def estimate(self, lo: float = LOWEST) -> float:
        """What `mass` may be, from an eighth of the row."""
        return float(lib.loragraph_row_estimate(self._bounds(lo, HIGHEST)))

    def split(
        self,
        token: int,
        lo: float,
        hi: float = HIGHEST,
        outer: float = LOWEST,
        *,
        most: float = math.inf,
        rest: float = math.inf,
        exact: bool = False,
    ) -> tuple[float, float]:
        """`mass`, with those on the bounds themselves whose id is below `token`; and the others'.

        The others are those above `outer` that are not in the first. Sums no further once the first
        reaches `most` or the second `rest`.
        """
        out = ffi.new("double[2]")
        lib.loragraph_row_split(self._bounds(lo, hi), token, outer, most, rest, exact, out)
        return float(out[0]), float(out[1] - out[0])

    def mean(self, lo: float = LOWEST) -> tuple[float, float]:
        """The window's mass, and the mean logit by weight at temperature 1."""
        out = ffi.new("double[2]")
        lib.loragraph_row_means(self._bounds(lo, HIGHEST), out)
        return float(out[0]), self.max + out[1] / out[0]

    def deviation(self) -> float:
        """Standard deviation of the logits that are not -inf; infinite where F32 overflows."""
        out = ffi.new("double[3]")
        lib.loragraph_row_moments(self._bounds(LOWEST, HIGHEST), out)
        count, total, squares = out
        variance = squares / count - (total / count) ** 2
        return math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.inf

    def max_below(self, hi: float) -> float:
        """The largest value below `hi`, -inf if there is none."""
        return float(lib.loragraph_row_max_below(self._x, self._n, hi))

    def draw(
        self,
        u: float,
        temperature: float,
        lo: float = LOWEST,
        hi: float = HIGHEST,
        peak: float | None = None,
    ) -> int:
        """The token at share `u` of the window's mass, in the order of the ids; -1: it is empty."""
        window = self._bounds(lo, hi)
        window.temperature = temperature
        if peak is not None:
            window.max = peak
        return int(lib.loragraph_row_draw(window, u, self._sums, self._mass))

    @property
    def drawn_mass(self) -> float:
        """Mass of the window of the last `draw`, at its temperature."""
        return float(self._mass[0])

    def _bounds(self, lo: float, hi: float) -> Any:
        window = self._window
        window.lo, window.hi, window.max, window.temperature = lo, hi, self._scan.max, 1.0
        return window


def best_of_rows(logits: Logits, rows: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The largest logit's lowest id in these rows of (n_rows, n) f32, and which rows are finite."""
    n = logits.shape[1]
    if logits.strides[1] != logits.itemsize or logits.strides[0] % logits.itemsize:
        logits = np.ascontiguousarray(logits)
    # cffi's arrays, not numpy's: for a row or two, numpy's calls cost more than the scan
    found = ffi.new("row_scan[]", len(rows))
    maxima = ffi.new("float[]", lib.loragraph_row_blocks(n))
    lib.loragraph_rows_scan(
        pointer(logits, "float *"),
        logits.strides[0] // logits.itemsize,
        ffi.new("int64_t[]", list(rows)),
        len(rows),
        n,
        maxima,
        found,
    )
    return [one.best for one in found], [one.finite != 0 for one in found]


class MersenneTwister:
    """The random numbers of libllama's dist sampler: std::mt19937, and its F64 in [0, 1)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._state = ffi.new("mt_state *")
        self.reset()

    def uniform(self) -> float:
        """The next one."""
        return float(lib.loragraph_mt_uniform(self._state))

    def reset(self) -> None:
        """Back to the seed."""
        lib.loragraph_mt_seed(self._state, self.seed)

    def clone(self) -> MersenneTwister:
        """Another one in the same state."""
        other = MersenneTwister(self.seed)
        other._state[0] = self._state[0]
        return other


def draw_candidate(candidates: int, n: int, u: float) -> int:
    """The index that libllama's dist sampler chooses among `n` llama_token_data at an address."""
    return int(lib.loragraph_candidates_draw(ffi.cast("row_candidate *", candidates), n, u))
