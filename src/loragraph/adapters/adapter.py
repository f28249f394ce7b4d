"""A loaded adapter: immutable, without a name, its tensors in one aligned block of host memory.

Knows neither files nor graphs: `gguf` makes one, graphs read its addresses. Checked against one
base; a reference to it is a promise that the memory stays, kept by attach() and detach().
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import Shape
from loragraph.adapters.report import LoadReport
from loragraph.adapters.values import dequantised
from loragraph.adapters.vectors import RowVectors
from loragraph.errors import InvalidRequestError, LifecycleError
from loragraph.ggml.gguf import Scalar

MetadataValue = Scalar | tuple[Scalar, ...]
"""Of a key of a GGUF file; arrays are tuples."""

ALIGNMENT = 64
"""Bytes; a cache line, and enough for every vector load of the kernels."""


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One half of a pair, in the adapter's block."""

    type: int  # ggml type number: F32, F16, BF16 or Q8_0
    ne: Shape  # ggml order
    offset: int  # bytes from the start of the block, a multiple of ALIGNMENT
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The low-rank part of one target.

    a [n_in, rank] · b [rank, n_out]; experts: ne[2] = n_expert in both; the token table:
    a [rank, n_vocab] · b [rank, n_embd].
    """

    target: str
    a: LoraTensor
    b: LoraTensor
    rank: int  # b.ne[0]
    scale: float  # effective scale at user scale 1


def scale_of(alpha: float, rank: int, user_scale: float) -> float:
    """The factor in front of B A x, an f32 value.

    Semantics: user_scale · alpha / rank, or user_scale where alpha is 0; in f32, left to right,
    as llama.cpp computes it, so that results can agree to the bit.
    """
    with np.errstate(over="ignore"):
        scale = np.float32(user_scale)
        if np.float32(alpha) != 0:
            scale = scale * np.float32(alpha) / np.float32(rank)
    return float(scale)


def allocate_block(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` of zeroed memory, (nbytes,) u8, whose address is a multiple of ALIGNMENT."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class AdapterHost(Protocol):
    """A model, as far as loading an adapter for it goes."""

    def load_adapter(
        self,
        path: str | os.PathLike[str],
        *,
        ignore_norm: bool = False,
        tied_output: bool | None = None,
    ) -> Adapter:
        """Loads, checks and registers an adapter."""


class Adapter:
    """An immutable LoRA adapter in memory; equality is identity, `digest` identifies content."""

    def __init__(
        self,
        pairs: Mapping[str, LoraPair],
        data: NDArray[np.uint8],
        report: LoadReport,
        *,
        alpha: float = 0.0,
        metadata: Mapping[str, MetadataValue] | None = None,
        invocation_tokens: Sequence[int] = (),
        tied_output: bool = False,
        vectors: Mapping[str, RowVectors] | None = None,
    ) -> None:
        """Takes `data` over: (nbytes,) u8 from allocate_block(), not written any more."""
        data.flags.writeable = False
        self.pairs: Mapping[str, LoraPair] = MappingProxyType(dict(sorted(pairs.items())))
        self.report = report
        self.alpha = alpha
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(dict(metadata or {}))
        self.invocation_tokens = tuple(invocation_tokens)
        self.tied_output = tied_output  # token_embd's pair changes the tied head too
        self.vectors: Mapping[str, RowVectors] = MappingProxyType(
            dict(sorted((vectors or {}).items()))
        )
        self.nbytes = len(data) + sum(part.nbytes for part in self.vectors.values())
        self._data: NDArray[np.uint8] | None = data
        self._lock = threading.Lock()
        self._attached: Counter[str] = Counter()
        self._on_close: list[Callable[[Adapter], None]] = []
        self.digest = self._digest()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: AdapterHost,
        *,
        ignore_norm: bool = False,
        tied_output: bool | None = None,
    ) -> Adapter:
        """Loads an adapter, checks it against `model` and registers it there.

        `path` is a GGUF file, or a folder of PEFT or MLX with safetensors, which is converted for
        the model's file, in F32, through a temporary file. `ignore_norm` leaves `*_norm.weight`
        tensors out instead of refusing them; `tied_output` decides whether the token table's pair
        also changes a tied head (None: what the file says, else True, with a warning). Raises
        GGUFError, AdapterFormatError, AdapterMismatchError, UnsupportedError, CapacityError.
        """
        return model.load_adapter(path, ignore_norm=ignore_norm, tied_output=tied_output)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.pairs)} targets"
        return f"Adapter({self.digest[:12]}, {state}, rank <= {self.rank_max})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def task_name(self) -> str:
        """`adapter.lora.task_name`, "" where the file has none."""
        return self._text("adapter.lora.task_name")

    @property
    def prompt_prefix(self) -> str:
        """`adapter.lora.prompt_prefix`, "" where the file has none."""
        return self._text("adapter.lora.prompt_prefix")

    @property
    def rank_max(self) -> int:
        """Largest rank of any target."""
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def alone(self) -> dict[str, RowVectors]:
        """The vectors of targets without a pair: biases, and changes of norms."""
        return {name: part for name, part in self.vectors.items() if name not in self.pairs}

    @property
    def data(self) -> NDArray[np.uint8]:
        """All tensors, (nbytes,) u8, read-only; borrowed until close()."""
        data = self._data
        if data is None:
            raise LifecycleError(f"adapter {self.digest[:12]} was used after its close")
        return data

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._data is None

    def address(self, tensor: LoraTensor) -> int:
        """Address of a tensor's first byte, a multiple of ALIGNMENT; borrowed until close()."""
        return int(self.data.ctypes.data) + tensor.offset

    def raw(self, tensor: LoraTensor) -> NDArray[np.uint8]:
        """A tensor's bytes, (nbytes,) u8, read-only, without a copy."""
        return self.data[tensor.offset : tensor.offset + tensor.nbytes]

    def array(self, tensor: LoraTensor) -> NDArray[np.float32]:
        """A tensor's values in numpy order, f32, a copy: a (rank, n_in), b (n_out, rank).

        Experts have n_expert in front; the token table is a (n_vocab, rank), b (n_embd, rank).
        """
        return dequantised(tensor.type, self.raw(tensor), tensor.ne)

    def effective_scale(self, target: str, user_scale: float = 1.0) -> float:
        """The factor in front of B A x for `target`; InvalidRequestError where not finite."""
        scale = scale_of(self.alpha, self.pairs[target].rank, user_scale)
        if not math.isfinite(scale):
            raise InvalidRequestError(
                f"expected a scale whose product with alpha is finite, got {user_scale}",
                param="scale",
            )
        return scale

    def attach(self, where: str) -> None:
        """Notes a user of the memory, named for the error of a premature close()."""
        with self._lock:
            if self._data is None:
                raise LifecycleError(f"adapter {self.digest[:12]} was attached after its close")
            self._attached[where] += 1

    def detach(self, where: str) -> None:
        """Takes back one attach() of the same name."""
        with self._lock:
            if not self._attached[where]:
                raise LifecycleError(f"adapter {self.digest[:12]} is not attached to {where}")
            self._attached[where] -= 1
            self._attached += Counter()  # drops the zeros

    @property
    def attached_to(self) -> tuple[str, ...]:
        """Names of the present users, sorted."""
        with self._lock:
            return tuple(sorted(self._attached))

    def close(self) -> None:
        """Frees the memory; LifecycleError while attached. A second call does nothing."""
        with self._lock:
            if self._attached:
                places = ", ".join(sorted(self._attached))
                raise LifecycleError(
                    f"adapter {self.digest[:12]} was closed while attached to {places}",
                    hint="detach it there first",
                )
            self._data = None
            callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback(self)

    def on_close(self, callback: Callable[[Adapter], None]) -> None:
        """Calls `callback(self)` after close(): whoever keeps something made of the memory."""
        with self._lock:
            self._on_close.append(callback)

    def _text(self, key: str) -> str:
        value = self.metadata.get(key, "")
        return "" if isinstance(value, tuple) else str(value)

    def _digest(self) -> str:
        """SHA-256 of all that decides a request's result, independent of the file's order."""
        tokens = self.invocation_tokens
        sha = hashlib.sha256(b"loragraph adapter 1\0")
        # An absent alpha acts as 0, and -0 as 0, so they hash alike.
        sha.update(struct.pack("<f?q", self.alpha or 0.0, self.tied_output, len(tokens)))
        sha.update(struct.pack(f"<{len(tokens)}q", *tokens))
        for target, pair in self.pairs.items():
            name = target.encode()
            sha.update(struct.pack("<q", len(name)) + name)
            for tensor in (pair.a, pair.b):
                sha.update(struct.pack("<i5q", tensor.type, *tensor.ne, tensor.nbytes))
                sha.update(self.raw(tensor).data)
        for target, part in self.vectors.items():
            sha.update(b"vectors" + target.encode() + b"\0")
            part.add_to(sha)
        return sha.hexdigest()
