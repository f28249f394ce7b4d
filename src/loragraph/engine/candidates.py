"""What libllama's samplers work on: candidates in numpy memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.params import SamplingParams
from loragraph.errors import BackendError
from loragraph.ggml.lib import Library

_UNDERFLOW = 87.0  # exp(-88) is no normal float32; libllama's logarithms would be NaN

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data

Left = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids (n,) i64 and the logarithms of their probabilities (n,) f64, the best first."""


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

    def left(self) -> Left:
        """What filters have left, after the temperature."""
        n = int(self.ptr.size)
        memory = self._lib.ffi.buffer(self.ptr.data, n * _CANDIDATE.itemsize)
        data = np.frombuffer(memory, _CANDIDATE)
        data = data[np.argsort(-data["logit"], kind="stable")]
        logits = data["logit"].astype(np.float64)
        n = int(np.count_nonzero(logits > -np.inf))
        logits = logits[:n] - logits[0]
        return data["id"][:n].astype(np.int64), logits - math.log(np.exp(logits).sum())

    def drop_forbidden(self, window: float) -> None:
        """Leaves out logits of -inf, and those more than `window` below the best."""
        logit = self.data["logit"]
        keep = logit > -np.inf
        if window < math.inf:
            keep &= logit >= logit.max(initial=-np.inf) - window
        if not keep.all():
            self.data = self.data[keep]
            self._wrap()

    def prepare(self, params: SamplingParams) -> None:
        """Leaves out, and lowers, what libllama's filters for these parameters cannot take."""
        takes_logarithms = params.typical_p < 1 or params.mirostat
        self.drop_forbidden(_UNDERFLOW if takes_logarithms else math.inf)
        if params.dynatemp_range > 0 and len(self.data):
            # the best becomes 0: a temperature next to nothing then overflows none
            self.data["logit"] -= self.data["logit"].max()

    def _wrap(self) -> None:
        ffi = self._lib.ffi
        self._memory = ffi.from_buffer(self.data) if len(self.data) else ffi.NULL
        data = ffi.cast("llama_token_data *", self._memory)
        self.ptr = ffi.new("llama_token_data_array *", [data, len(self.data), -1, self._ranked])
