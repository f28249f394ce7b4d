"""What libllama's samplers work on: candidates in numpy memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import BackendError
from loragraph.ggml.lib import Library

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_CHUNK = 64


class Candidates:
    """A `llama_token_data_array` over numpy memory, (n,) of (id, logit, p)."""

    def __init__(
        self,
        lib: Library,
        ids: NDArray[np.intp],
        logits: NDArray[np.float32],
        *,
        ranked: bool = False,
    ) -> None:
        self._lib = lib
        self._ranked = ranked  # the best first
        self.data: NDArray[Any] = np.empty(len(ids), _CANDIDATE)
        self.data["id"] = ids
        self.data["logit"] = logits[ids] if ranked or len(ids) != len(logits) else logits
        self._wrap()

    @property
    def selected(self) -> int:
        """The token that the last sampler of a chain chose."""
        index = int(self.ptr.selected)
        if not 0 <= index < int(self.ptr.size):
            raise BackendError("libllama's sampler chain chose no candidate")
        return int(self.ptr.data[index].id)  # a filter may move the beginning: not `self.data`

    def drop_forbidden(self, window: float) -> None:
        """Leaves out logits of -inf, and those more than `window` below the best."""
        logit = self.data["logit"]
        keep = logit > -np.inf
        if window < math.inf:
            keep &= logit >= logit.max(initial=-np.inf) - window
        if not keep.all():
            self.data = self.data[keep]
            self._wrap()

    def lower(self) -> None:
        """Takes the best logit from all: a temperature next to nothing then overflows none."""
        self.data["logit"] -= self.data["logit"].max()

    def _wrap(self) -> None:
        ffi = self._lib.ffi
        self._memory = ffi.from_buffer(self.data) if len(self.data) else ffi.NULL
        data = ffi.cast("llama_token_data *", self._memory)
        self.ptr = ffi.new("llama_token_data_array *", [data, len(self.data), -1, self._ranked])


def ranked(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ids of the `n` largest logits, best first, the lower id first among equals."""
    ids = _above_nth(logits, n) if n < len(logits) else np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][:n]


def _above_nth(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """Ids, ascending, of the n-th largest logit and of all that are no smaller.

    The n-th largest of the peaks of chunks is no larger than the n-th largest logit, so only
    chunks whose peak reaches it are looked at: a quarter of the time for 49,152 tokens.
    """
    n_chunks = len(logits) // _CHUNK
    ids = None
    if n_chunks > 2 * n:
        peaks = logits[: n_chunks * _CHUNK].reshape(n_chunks, _CHUNK).max(axis=1)
        chunks = np.flatnonzero(peaks >= _nth_largest(peaks, n))
        rest = np.arange(n_chunks * _CHUNK, len(logits))
        ids = np.concatenate([(chunks[:, None] * _CHUNK + np.arange(_CHUNK)).ravel(), rest])
        logits = logits[ids]
    above = np.flatnonzero(logits >= _nth_largest(logits, n))
    return above if ids is None else ids[above]


def _nth_largest(values: NDArray[np.float32], n: int) -> np.float32:
    """The n-th largest; the smallest of fewer."""
    place = max(0, len(values) - n)
    return np.float32(np.partition(values, place)[place])
