"""Naive merge of adapters into a base: float64 arithmetic, an F32 GGUF file out.

For the equality "run time = merged". Scale tensors of the weights are multiplied in and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderField

from tests.gguf_bytes import Value, tensor, write_gguf
from tests.reference.adapter import AdapterArrays, read_tensors

_HEAD, _TABLE = "output.weight", "token_embd.weight"


def merge(
    base: str | Path | Sequence[Path],
    adapters: Sequence[tuple[AdapterArrays, float]],
    out: str | Path,
    *,
    tied_output: bool = True,
) -> Path:
    """Write `base` (a file, or all files of a split model) with `adapters` at their user scales.

    A tied base whose table or head an adapter changes becomes untied; `tied_output` says whether
    an adapter of the table changes the head too.
    """
    paths = [Path(base)] if isinstance(base, str | Path) else list(base)
    weights = merged(read_tensors(*paths), adapters, tied_output=tied_output)
    tensors = [tensor(name, values) for name, values in weights.items()]
    return write_gguf(out, _metadata(paths[0]), tensors)


def merged(
    weights: Mapping[str, npt.NDArray[np.float32]],
    adapters: Sequence[tuple[AdapterArrays, float]],
    *,
    tied_output: bool = True,
) -> dict[str, npt.NDArray[np.float64]]:
    """Base weights by GGUF name with the adapters' deltas added."""
    out = {name: values.astype(np.float64) for name, values in weights.items()}
    names = {name for adapter, _ in adapters for name in adapter.pairs}
    is_tied = _HEAD not in out
    if is_tied and names & {_HEAD, _TABLE}:
        out[_HEAD] = out[_TABLE].copy()
    for name in [name for name in out if name.endswith(".scale")]:
        weight = name.removesuffix(".scale") + ".weight"
        factor = out.pop(name)
        out[weight] *= factor if factor.size == 1 else factor[:, None, None]
    for adapter, user_scale in adapters:
        for name in adapter.pairs:
            out[name] = out[name] + adapter.delta(name, user_scale)
            if name == _TABLE and is_tied and tied_output:
                out[_HEAD] = out[_HEAD] + adapter.delta(name, user_scale)
    return out


def _metadata(path: Path) -> dict[str, Value]:
    fields = GGUFReader(path, "r").fields
    return {
        key: _value(item)
        for key, item in fields.items()
        if not key.startswith(("GGUF.", "split.")) and key != "general.file_type"
    }


def _value(item: ReaderField) -> Value:
    """The field's value with its type kept."""
    if item.types[-1] == GGUFValueType.STRING:
        text: Value = item.contents()
        return text
    values = np.concatenate([item.parts[index] for index in item.data])
    scalar: np.generic = values[0]
    return values if item.types[0] == GGUFValueType.ARRAY else scalar
