"""Checks of magnitudes, biases and changes of norms; `checks` has them in its lists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loragraph.adapters.adapter import scale_of
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo, TargetKind
from loragraph.adapters.draft import Draft, DraftPair
from loragraph.adapters.tied import resolve_tied_output
from loragraph.adapters.values import Bytes
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    LoragraphError,
    UnsupportedError,
)
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import F32

Problems = Iterator[LoragraphError]

_NORM = "_norm.weight"
_CONVERT = "convert the training's own files again with loragraph convert"


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
                hint=_CONVERT,
            )
        elif tensor.type != F32:
            yield AdapterFormatError(
                f"tensor '{tensor.name}': expected type F32, got type number {tensor.type}",
                path=draft.path,
                hint=_CONVERT,
            )
    if pair.bias is not None and pair.target == TOKEN_EMBD:
        yield AdapterFormatError(
            f"tensor '{pair.bias.name}': a lookup has no bias", path=draft.path, hint=_CONVERT
        )
    if pair.delta is not None:
        yield AdapterFormatError(
            f"tensor '{pair.delta.name}': a norm's weight has no low-rank pair",
            path=draft.path,
            hint=_CONVERT,
        )


def alone_bias(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """A bias without a pair is one F32 value for each row of a linear weight."""
    if pair.bias is None:
        return
    yield from _one_f32_row(draft, pair.bias)
    if base is None:
        return
    target = base.targets[pair.target]
    if target.kind is not TargetKind.LINEAR:
        yield AdapterMismatchError(
            f"tensor '{pair.bias.name}' would change nothing: a bias applies to linear weights, "
            f"and the base's is of kind '{target.kind.value}', shape {list(target.ne)}",
            adapter=str(draft.path),
            tensor=pair.target,
            hint="adapters change matrices and their biases; convert without this one",
        )
    elif pair.bias.ne[0] != target.ne[1]:
        yield _wrong_size(draft, pair, pair.bias, target.ne[1])


def alone_delta(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """The change of a norm's weight is one F32 value for each of the weight's."""
    if pair.delta is None:
        return
    if not pair.target.endswith(_NORM) or pair.bias is not None:
        yield AdapterFormatError(
            f"tensor '{pair.delta.name}': expected the change of a norm's weight, *{_NORM}, alone",
            path=draft.path,
            hint=_CONVERT,
        )
        return
    yield from _one_f32_row(draft, pair.delta)
    if base is not None and pair.delta.ne != base.targets[pair.target].ne:
        yield _wrong_size(draft, pair, pair.delta, base.targets[pair.target].ne[0])


def _one_f32_row(draft: Draft, tensor: TensorInfo) -> Problems:
    if tensor.type != F32 or tensor.ne[1:] != (1, 1, 1):
        yield AdapterFormatError(
            f"tensor '{tensor.name}': expected one row of F32, got type number {tensor.type}, "
            f"shape {list(tensor.ne)}",
            path=draft.path,
            hint=_CONVERT,
        )


def _wrong_size(
    draft: Draft, pair: DraftPair, tensor: TensorInfo, expected: int
) -> AdapterMismatchError:
    return AdapterMismatchError(
        f"tensor '{tensor.name}' has incorrect shape (hint: maybe wrong base model?): expected "
        f"{expected} values, got {tensor.ne[0]}",
        adapter=str(draft.path),
        tensor=pair.target,
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
            hint="the training diverged, or adapter.lora.alpha is wrong",
        )
