"""A model file in one piece or in parts, as llama.cpp's gguf-split cuts it: whole tensors, keys in
the first part, `split.no`, `split.count` and `split.tensors.count` in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loragraph.errors import ConfigError
from loragraph.tools.gguf_header import OutTensor, aligned, header_bytes, integer_bytes, offsets

_MAX_PARTS = 65535
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class Part:
    """One file: its header, and the place of each of its tensors' bytes."""

    path: Path
    head: bytes
    tensors: Sequence[OutTensor]
    places: Sequence[int]  # bytes from the start of the file
    nbytes: int


def plan_parts(
    out: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[OutTensor],
    *,
    version: int = 3,
    alignment: int = 32,
    max_bytes: int = 0,
) -> list[Part]:
    """One part named `out`, or with `max_bytes` parts of at most so many bytes of tensors each.

    A larger tensor has a part to itself.
    """
    keys = {key: value for key, value in keys.items() if key not in _SPLIT_KEYS}
    if max_bytes <= 0:
        return [_part(out, keys, tensors, version, alignment)]
    groups = _groups(tensors, alignment, max_bytes)
    if len(groups) > _MAX_PARTS:
        raise ConfigError(
            f"expected at most {_MAX_PARTS} parts, got {len(groups)}", field="max_split_bytes"
        )
    stem = out.name.removesuffix(".gguf")
    parts = []
    for i, group in enumerate(groups):
        split = {
            "split.no": integer_bytes(i, 16),
            "split.count": integer_bytes(len(groups), 16),
            "split.tensors.count": integer_bytes(len(tensors), 32, signed=True),
        }
        path = out.with_name(f"{stem}-{i + 1:05}-of-{len(groups):05}.gguf")
        own = keys if i == 0 else {k: v for k, v in keys.items() if k == "general.alignment"}
        parts.append(_part(path, {**own, **split}, group, version, alignment))
    return parts


def _groups(tensors: Sequence[OutTensor], alignment: int, max_bytes: int) -> list[list[OutTensor]]:
    groups: list[list[OutTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        nbytes = aligned(tensor.nbytes, alignment)
        if groups[-1] and nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= nbytes
    return groups


def _part(
    path: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[OutTensor],
    version: int,
    alignment: int,
) -> Part:
    head = header_bytes(keys, tensors, version=version, alignment=alignment)
    places, end = offsets(tensors, len(head), alignment)
    return Part(path, head, tensors, places, end)
