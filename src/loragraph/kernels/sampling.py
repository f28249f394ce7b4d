"""Choosing from a row of logits in C (sampling.h): a scan, the best k, masses and draws.

In: rows of logits and bounds. Out: token ids. What the bounds mean, the callers know.

A pass over a row is a generator that yields the call to be run, and gives what was found when it
goes on: so whoever holds the rows of many sequences runs their calls beside one another, and
`alone` runs those of one.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.library import CustomNode, ffi, lib, pointer

Logits = NDArray[np.float32]
RowCall = Any
"""A `row_call *` (sampling.h)."""

_T = TypeVar("_T")
Passes = Generator[RowCall, None, _T]
"""Calls one after another, each to be run before the next is asked for; then what came of them."""

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
        self._call = ffi.new("row_call *", {"maxima": self._maxima, "sums": self._sums})
        self._window = self._call.window
        self._window.n = n
        self._scan = self._call.scan
        self._found = self._call.found
        self._x: Any = ffi.NULL
        self.drawn_mass = math.nan
        """Mass of the window of the last `draw`, at its temperature."""

    def read(self, logits: Logits) -> Passes[None]:
        """Scans (n,) f32, which is borrowed until the next call."""
        self._x = ffi.from_buffer("float[]", logits)
        self._window.x = self._x
        yield self._pass(lib.ROW_SCAN)

    def changed(self, ids: NDArray[np.int64]) -> Passes[None]:
        """To be called when the values at these ids, (n,) i64, are others than in `read`."""
        where = ffi.from_buffer("int64_t[]", ids)
        self._call.ids, self._call.n_ids = where, len(ids)
        yield self._pass(lib.ROW_RESCAN)

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

    def top(self, k: int) -> Passes[NDArray[np.int64]]:
        """Ids of the `k` largest, best first, the lower id among equals; at most all."""
        k = min(k, self._n)
        ids = np.empty(k, np.int64)
        heap = ffi.new("row_candidate[]", k)
        into = ffi.from_buffer("int64_t[]", ids)
        self._call.heap, self._call.ids, self._call.n_ids = heap, into, k
        yield self._pass(lib.ROW_TOP)
        return ids[: self._call.n_ids]

    def mass(
        self, lo: float = LOWEST, hi: float = HIGHEST, *, exact: bool = False
    ) -> Passes[float]:
        """Sum of the weights at temperature 1 and the row's own maximum."""
        self._call.exact = exact
        yield self._pass(lib.ROW_MASS, lo, hi)
        return float(self._found[0])

    def estimate(self, lo: float = LOWEST) -> Passes[float]:
        """What `mass` may be, from an eighth of the row."""
        yield self._pass(lib.ROW_ESTIMATE, lo)
        return float(self._found[0])

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
    ) -> Passes[tuple[float, float]]:
        """`mass`, with those on the bounds themselves whose id is below `token`; and the others'.

        The others are those above `outer` that are not in the first. Sums no further once the first
        reaches `most` or the second `rest`.
        """
        call = self._call
        call.id, call.outer_lo, call.most, call.rest, call.exact = token, outer, most, rest, exact
        yield self._pass(lib.ROW_SPLIT, lo, hi)
        return float(self._found[0]), float(self._found[1] - self._found[0])

    def deviation(self) -> Passes[float]:
        """Standard deviation of the logits that are not -inf; infinite where F32 overflows."""
        yield self._pass(lib.ROW_MOMENTS)
        count, total, squares = self._found
        variance = squares / count - (total / count) ** 2
        return math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.inf

    def draw(
        self,
        u: float,
        temperature: float,
        lo: float = LOWEST,
        hi: float = HIGHEST,
        peak: float | None = None,
    ) -> Passes[int]:
        """The token at share `u` of the window's mass, in the order of the ids; -1: it is empty."""
        call = self._pass(lib.ROW_DRAW, lo, hi)
        call.u, self._window.temperature = u, temperature
        if peak is not None:
            self._window.max = peak
        yield call
        self.drawn_mass = float(self._found[0])
        return int(call.id)

    def typical(
        self, typical_p: float, random: MersenneTwister, temperature: float, lo: float = LOWEST
    ) -> Passes[int]:
        """One of the tokens nearest to the mean logit, of a mass that just exceeds `typical_p`.

        Drawn with `random` at the temperature; -1 where the window is empty.
        """
        call = self._pass(lib.ROW_TYPICAL, lo)
        call.u, call.first, self._window.temperature = typical_p, random.state, temperature
        yield call
        return int(call.id)

    def _pass(self, what: int, lo: float = LOWEST, hi: float = HIGHEST) -> RowCall:
        window = self._window
        window.lo, window.hi, window.max, window.temperature = lo, hi, self._scan.max, 1.0
        self._call.what = what
        return self._call


def other(function: Any, first: int, second: int) -> Passes[None]:
    """A call of a C function with two addresses, to be run beside passes over rows."""
    call = ffi.new("row_call *", {"what": lib.ROW_OTHER})
    call.other = ffi.cast("void (*)(void *, void *)", function)
    call.first, call.second = (ffi.cast("void *", address) for address in (first, second))
    yield call


def run_alone(calls: Sequence[RowCall]) -> None:
    """Runs calls on this thread."""
    for call in calls:
        lib.loragraph_row_call(call)


def alone(passes: Passes[_T]) -> _T:
    """What passes give that run on this thread."""
    while True:
        try:
            lib.loragraph_row_call(next(passes))
        except StopIteration as end:
            found: _T = end.value
            return found


class RowCallsNode(CustomNode):
    """Runs many calls on the threads of a compute."""

    function_name = "loragraph_row_calls_run"

    def __init__(self) -> None:
        self._struct = ffi.new("row_calls *")
        self._calls: Any = ffi.NULL

    def write(self, calls: Sequence[RowCall]) -> None:
        """What the next compute runs; the calls must outlive it."""
        self._calls = ffi.new("row_call *[]", list(calls))
        self._struct.calls, self._struct.n, self._struct.next = self._calls, len(calls), 0


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
        self.state = ffi.new("mt_state *")
        self.reset()

    def uniform(self) -> float:
        """The next one."""
        return float(lib.loragraph_mt_uniform(self.state))

    def reset(self) -> None:
        """Back to the seed."""
        lib.loragraph_mt_seed(self.state, self.seed)

    def clone(self) -> MersenneTwister:
        """Another one in the same state."""
        other = MersenneTwister(self.seed)
        other.state[0] = self.state[0]
        return other


def draw_candidate(candidates: int, n: int, u: float) -> int:
    """The index that libllama's dist sampler chooses among `n` llama_token_data at an address."""
    return int(lib.loragraph_candidates_draw(ffi.cast("row_candidate *", candidates), n, u))
