"""Threads that share a step's sampling: the rows of a step are independent of one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_WORTH_IT = 1 << 20
"""Values of all rows from which on a second thread gains more than handing work over costs."""


class Crew:
    """Calls a function for each of many items on `n_threads` threads, the caller's among them.

    What the function does must take most of its time outside the interpreter's lock, as the kernels
    for rows of logits do. One caller at a time.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._pool: ThreadPoolExecutor | None = None  # made when it is needed

    def each(self, call: Callable[[int], None], items: Sequence[int], size: int) -> None:
        """`call` of every item, in no order; `size` is how many values one call reads.

        Returns when all calls have; what a call raises comes out, after the others have ended.
        """
        n = min(self._n_threads, len(items))
        if n < 2 or len(items) * size < _WORTH_IT:
            n = 1
        if n > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self._n_threads - 1, "loragraph-sample")
        shares = [items[first::n] for first in range(n)]
        others = [self._pool.submit(_each, call, share) for share in shares[1:] if self._pool]
        try:
            _each(call, shares[0])
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _each(call: Callable[[int], None], items: Sequence[int]) -> None:
    for item in items:
        call(item)
