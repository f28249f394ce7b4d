"""Adapters made by tools, to GGUF: pairs whose product is the whole change, one alpha for the file.

A file has one alpha, while ranks differ: alpha is the largest rank, and each B is multiplied by
rank / alpha, so that `alpha / rank` at run time gives 1. llama.cpp loads such files, unless they
hold biases or magnitudes (docs/adapter-format.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.draft import ALPHA_KEY, INVOCATION_KEY, TIED_OUTPUT_KEY
from loragraph.adapters.vectors import RowVectors
from loragraph.errors import ConfigError, InvalidRequestError
from loragraph.ggml.handles import BF16, F16, F32, Q8_0
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import Bytes, block_values, from_f32, largest, row_bytes, type_name
from loragraph.tools.gguf_header import OutTensor, value_bytes
from loragraph.tools.output import out_files
from loragraph.tools.split import plan_parts

Floats = NDArray[np.float32]

OUT_TYPES: Mapping[str, int] = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}
"""Types of adapter tensors that can be asked for."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The pair of one target at full scale, numpy order as the file has it.

    a (rank, n_in), b (n_out, rank); experts with n_expert in front; the token table: a (n_vocab,
    rank), b (n_embd, rank).
    """

    target: str
    a: Floats
    b: Floats
    shift: Floats | None = None  # added beside the product, (n_out,)
    magnitude: Floats | None = None  # DoRA's m, (n_out,)

    @property
    def rank(self) -> int:
        """The last size of b."""
        return int(self.b.shape[-1])


def out_type(name: str) -> int:
    """The ggml type of this name; ConfigError for one that adapters cannot have."""
    if name not in OUT_TYPES:
        raise ConfigError(f"expected one of {', '.join(OUT_TYPES)}, got {name!r}", field="outtype")
    return OUT_TYPES[name]


def adapter_keys(
    arch: str,
    *,
    name: str = "",
    invocation_tokens: Sequence[int] = (),
    tied_output: bool | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """The keys of an adapter file but alpha, values as bytes."""
    keys = {
        "general.architecture": value_bytes(arch),
        "general.type": value_bytes("adapter"),
        "adapter.type": value_bytes("lora"),
    }
    if name:
        keys["general.name"] = value_bytes(name)
    if invocation_tokens:
        keys[INVOCATION_KEY] = value_bytes(np.array(invocation_tokens, np.uint32))
    if tied_output is not None:
        keys[TIED_OUTPUT_KEY] = value_bytes(tied_output)
    return keys | dict(extra or {})


def write_adapter(
    lib: Library,
    path: Path,
    keys: Mapping[str, bytes],
    factors: Sequence[Factors],
    type_: int,
    alone: Mapping[str, RowVectors] | None = None,
) -> int:
    """Writes the file, complete or not at all; gives its size in bytes.

    `alone` are biases and changes of norms, by target, that have no pair.

    Halves whose rows do not fit the blocks of `type_` are F16. InvalidRequestError where a value
    is too large for the type.
    """
    alpha = float(max((pair.rank for pair in factors), default=1))
    keys = {**keys, ALPHA_KEY: value_bytes(alpha)}
    tensors: list[OutTensor] = []
    datas: list[Bytes] = []
    for pair in sorted(factors, key=lambda pair: pair.target):
        factor = np.float32(pair.rank / alpha)
        for half, values in (("lora_a", pair.a), ("lora_b", pair.b * factor)):
            tensor, data = _stored(lib, f"{pair.target}.{half}", values, type_)
            tensors.append(tensor)
            datas.append(data)
        shift = None if pair.shift is None else pair.shift * factor
        for half, vector in (("lora_bias", shift), ("lora_magnitude", pair.magnitude)):
            if vector is not None:
                tensor, data = _stored(lib, f"{pair.target}.{half}", vector, F32)
                tensors.append(tensor)
                datas.append(data)
    for target, vectors in sorted((alone or {}).items()):
        for half, vector in (("lora_bias", vectors.shift), ("lora_delta", vectors.delta)):
            if vector is not None:
                tensor, data = _stored(lib, f"{target}.{half}", vector, F32)
                tensors.append(tensor)
                datas.append(data)
    (part,) = plan_parts(path, keys, tensors)
    with out_files([path]) as (file,):
        file.reserve(part.nbytes)
        file.write(part.head, 0)
        for data, place in zip(datas, part.places, strict=True):
            file.write(data.data, place)
    return part.nbytes


def _stored(lib: Library, name: str, values: Floats, type_: int) -> tuple[OutTensor, Bytes]:
    n = values.shape[-1]
    if n % block_values(lib, type_):
        type_ = F16
    bound = largest(type_)
    if not np.all(np.abs(values) <= bound):  # false for NaN too
        raise InvalidRequestError(
            f"{name}: expected values within ±{bound:g}, which {type_name(lib, type_)} can hold",
            param="outtype",
            hint="write f32",
        )
    rows = np.ascontiguousarray(values.reshape(-1, n), np.float32)
    data = np.empty(len(rows) * row_bytes(lib, type_, n), np.uint8)
    from_f32(lib, type_, rows, data)
    return OutTensor(name, tuple(reversed(values.shape)), type_, len(data)), data
