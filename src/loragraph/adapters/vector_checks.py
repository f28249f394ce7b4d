"""Checks of the tensors beside a pair, magnitudes and biases; `checks` has them in its lists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loragraph.adapters.adapter import scale_of
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo
from loragraph.adapters.draft import Draft, DraftPair
from loragraph.adapters.tied import resolve_tied_output
from loragraph.adapters.values import Bytes
from loragraph.errors import AdapterFormatError, LoragraphError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import F32

Problems = Iterator[LoragraphError]


def tied_magnitude(draft: Draft, base: BaseInfo | None) -> Problems:
    """The magnitude of a lookup says nothing of a head that is tied to it."""
    table = draft.pairs.get(TOKEN_EMBD)
    if table is None or table.magnitude is None or not resolve_tied_output(draft, base)[0]:
        return
    yield UnsupportedError(
        f"{draft.path}: DoRA of a token table that changes the tied head too",
        what="DoRA of a tied table",
        hint="load it with tied_output=False to change the lookup alone",
    )


def vectors(draft: Draft, pair: DraftPair, _base: BaseInfo | None) -> Problems:
    """A magnitude or bias is one F32 value for each row that the pair changes."""
    assert pair.b is not None  # `complete` ran before
    for tensor in pair.vectors:
        if tensor.ne != (pair.b.ne[1], 1, 1, 1) or pair.b.ne[2] != 1:
            yield AdapterFormatError(
                f"tensor '{tensor.name}': expected one value for each of the {pair.b.ne[1]} rows "
                f"of lora_b, got {list(tensor.ne)}",
                path=draft.path,
            )
        elif tensor.type != F32:
            yield AdapterFormatError(
                f"tensor '{tensor.name}': expected type F32, got type number {tensor.type}",
                path=draft.path,
            )
    if pair.bias is not None and pair.target == TOKEN_EMBD:
        yield AdapterFormatError(
            f"tensor '{pair.bias.name}': a lookup has no bias", path=draft.path
        )


def bias_in_range(draft: Draft, tensor: TensorInfo, data: Bytes) -> Problems:
    """A bias times alpha / rank is finite."""
    pair = draft.pairs.get(tensor.name.rpartition(".")[0])
    if pair is None or pair.bias is not tensor or pair.b is None:
        return
    scale = np.float32(scale_of(draft.alpha, pair.b.ne[0], 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = data.view(np.float32) * scale
    if not np.isfinite(scaled).all():
        yield AdapterFormatError(
            f"tensor '{tensor.name}': its values times alpha / rank leave the range of f32",
            path=draft.path,
        )
