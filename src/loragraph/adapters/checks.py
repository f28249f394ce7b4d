"""The checks of an adapter, one small function each, in the order in which they run.

A check yields the problems it finds. To add one, write the function and put it into FILE_CHECKS
(the header as a whole), PAIR_CHECKS (one target; a pair's first problem ends its checks, so a check
may rely on those above it) or DATA_CHECKS (the values of one tensor). Every check that needs the
base does nothing without one. Messages keep llama.cpp's phrases, since people search for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from loragraph.adapters.base import TOKEN_EMBD, BaseInfo, TargetKind, target_kind
from loragraph.adapters.draft import (
    ALPHA_KEY,
    INVOCATION_KEY,
    TIED_OUTPUT_KEY,
    Draft,
    DraftPair,
)
from loragraph.adapters.values import TYPE_NAMES, Bytes, all_finite
from loragraph.adapters.vector_checks import (
    alone_bias,
    alone_delta,
    bias_in_range,
    tied_magnitude,
    vectors,
)
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    LoragraphError,
    UnsupportedError,
)
from loragraph.ggml.gguf import Scalar, TensorInfo

MAX_RANK = 4096
"""Larger ranks are refused: no training gives them, and scratch memory grows with the rank."""

_FUSED = re.compile(r"(blk\.\d+\.)attn_[qkv](?=\.weight$)")

_CONVERT = "convert the training's own files again with loragraph convert"

Problems = Iterator[LoragraphError]
FileCheck = Callable[[Draft, BaseInfo | None], Problems]
PairCheck = Callable[[Draft, DraftPair, BaseInfo | None], Problems]
DataCheck = Callable[[Draft, TensorInfo, Bytes], Problems]


def general_type(draft: Draft, _base: BaseInfo | None) -> Problems:
    """general.type is "adapter"."""
    got = draft.scalars.get("general.type", "")
    if got != "adapter":
        yield _format(
            draft,
            f"expect general.type to be 'adapter', but got: {_shown(got)}",
            "a base model stands before its adapters; loragraph inspect tells them apart",
        )


def architecture(draft: Draft, base: BaseInfo | None) -> Problems:
    """general.architecture is that of the base."""
    got = draft.scalars.get("general.architecture", "")
    if base is not None and got != base.arch:
        yield _mismatch(
            draft,
            f"model arch and LoRA arch mismatch: expected '{base.arch}' (base model '{base.name}')"
            f", got {_shown(got)}",
            hint="was it made for another base model?",
        )


def adapter_type(draft: Draft, _base: BaseInfo | None) -> Problems:
    """adapter.type is "lora"."""
    got = draft.scalars.get("adapter.type", "")
    if got != "lora":
        yield _format(
            draft,
            f"expect adapter.type to be 'lora', but got: {_shown(got)}",
            "control vectors and other kinds of adapters are not read",
        )


def alpha(draft: Draft, _base: BaseInfo | None) -> Problems:
    """adapter.lora.alpha is a number, of any width, finite in f32; it may be missing."""
    kind = draft.types.get(ALPHA_KEY, "f32")
    if kind in ("bool", "string") or kind.startswith("array"):
        yield _format(
            draft, f"invalid gguf type for {ALPHA_KEY}: expected f32, got {kind}", _CONVERT
        )
        return
    if not math.isfinite(draft.alpha):
        yield _format(
            draft,
            f"{ALPHA_KEY}: expected a number that is finite in f32, got {draft.alpha}",
            _CONVERT,
        )


def invocation_tokens(draft: Draft, _base: BaseInfo | None) -> Problems:
    """adapter.alora.invocation_tokens, where present, is a non-empty array of u32."""
    kind = draft.types.get(INVOCATION_KEY, "")
    if not kind:
        return
    if not kind.startswith("array"):
        yield _format(
            draft,
            f"invalid gguf type for {INVOCATION_KEY}: expected an array of u32, got {kind}",
            _CONVERT,
        )
    elif kind != "array of u32":
        yield _format(
            draft,
            f"invalid gguf element type for {INVOCATION_KEY}: expected an array of u32, got {kind}",
            _CONVERT,
        )
    elif not draft.invocation_tokens:
        yield _format(
            draft,
            f"{INVOCATION_KEY}: expected at least one token, got an empty array",
            "an adapter that is to be always active has no such key",
        )


def tied_output(draft: Draft, base: BaseInfo | None) -> Problems:
    """loragraph.adapter.tied_output is a bool, and the head is changed by one pair, not by two."""
    kind = draft.types.get(TIED_OUTPUT_KEY, "bool")
    if kind != "bool":
        yield _format(
            draft, f"invalid gguf type for {TIED_OUTPUT_KEY}: expected bool, got {kind}", _CONVERT
        )
        return
    wanted = draft.tied_output
    if wanted is None:
        wanted = draft.scalars.get(TIED_OUTPUT_KEY) is True
    both = TOKEN_EMBD in draft.pairs and "output.weight" in draft.pairs
    if base is not None and base.tied and both and wanted:
        yield _format(
            draft,
            f"tied_output asks that {TOKEN_EMBD} changes the head too, but output.weight has a "
            "pair of its own",
            "load it with tied_output=False",
        )


def suffixes(draft: Draft, _base: BaseInfo | None) -> Problems:
    """Every tensor is a half of a pair."""
    for name in draft.strays:
        yield _format(
            draft,
            f"LoRA tensor '{name}' has unexpected suffix: expected '.lora_a' or '.lora_b'",
            "only plain LoRA pairs are read; convert or merge whatever else was trained",
        )


def norms(draft: Draft, _base: BaseInfo | None) -> Problems:
    """Norm weights, which a low-rank adapter cannot change, are dropped only on demand."""
    if draft.ignore_norm:
        return
    for name in draft.norms:
        yield _format(
            draft,
            f"LoRA tensor '{name}' has unexpected suffix: it is a norm weight, which a low-rank "
            "part cannot change",
            "convert the training's own files for trained norms; llama.cpp skips it silently, and "
            "ignore_norm=True (--ignore-norm) does so too",
        )


def duplicates(draft: Draft, _base: BaseInfo | None) -> Problems:
    """No half of a pair stands twice in the file."""
    for name in draft.duplicates:
        yield _format(
            draft, f"LoRA tensor '{name}' is a duplicate: its half was seen before", _CONVERT
        )


def not_empty(draft: Draft, _base: BaseInfo | None) -> Problems:
    """There is at least one pair, or a vector that needs none."""
    if not draft.pairs and not draft.alone:
        yield _format(
            draft,
            "expected at least one pair of LoRA tensors, got none: would change nothing",
            "did the conversion find the training's weights?",
        )


def complete(draft: Draft, pair: DraftPair, _base: BaseInfo | None) -> Problems:
    """Both halves are there."""
    if pair.a is None or pair.b is None:
        missing = "lora_a" if pair.a is None else "lora_b"
        yield _format(
            draft,
            f"LoRA tensor pair for '{pair.target}' is missing one component: {missing}",
            _CONVERT,
        )


def in_base(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """The target is a tensor of the base."""
    if base is not None and pair.target not in base.targets:
        fused = _FUSED.sub(r"\1attn_qkv", pair.target)
        hint = "maybe wrong base model?"
        if fused != pair.target and fused in base.targets:
            hint = f"q, k and v are one matrix of this base, '{fused}'"
        yield _mismatch(
            draft,
            f"LoRA tensor '{pair.target}' does not exist in base model (hint: {hint}): "
            f"{base.arch} '{base.name}' with {len(base.targets)} tensors",
            pair.target,
        )


def can_be_changed(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """The target is a matrix that the graph multiplies or looks up: else nobody reads the pair."""
    if base is not None and base.targets[pair.target].kind is TargetKind.NONE:
        yield _mismatch(
            draft,
            f"LoRA tensor '{pair.target}' would change nothing: a low-rank part applies to no "
            f"tensor of its kind, base shape {list(base.targets[pair.target].ne)}",
            pair.target,
            "adapters change matrices; train and convert without this one",
        )


def not_latent(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """The target's rows are not rotated: a low-rank change of plain ones would not fit."""
    if base is not None and pair.target in base.latent:
        yield UnsupportedError(
            f"{draft.path}: LoRA tensor '{pair.target}' targets a prism.hadamard latent lookup "
            "table, which is not supported",
            what=f"adapters of the latent table {pair.target}",
            hint="train the adapter without the token table",
        )


def shape(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """A and B have the target's sizes."""
    if base is None:
        return
    a, b = _halves(pair)
    target = base.targets[pair.target]
    n_in, n_out = target.ne[0], target.ne[1]
    if target.kind is TargetKind.EMBEDDING:
        fits = b.ne[1] == n_in and a.ne[1] == n_out
        expected = f"lora_a [rank, {n_out}] and lora_b [rank, {n_in}]"
    else:
        fits = a.ne[0] == n_in and b.ne[1] == n_out
        expected = f"lora_a [{n_in}, rank] and lora_b [rank, {n_out}]"
    if not fits:
        yield _mismatch(
            draft,
            f"tensor '{pair.target}' has incorrect shape (hint: maybe wrong base model?): expected "
            f"{expected}, got {_shapes(pair)}",
            pair.target,
        )


def ranks_agree(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """A and B have one rank."""
    a, b = _halves(pair)
    if _kind(pair, base) is TargetKind.EMBEDDING:
        if a.ne[0] != b.ne[0]:
            yield _format(
                draft,
                f"tensor '{pair.target}': expected one rank in lora_a and lora_b, got "
                f"{_shapes(pair)}",
                "of a token table both halves are transposed; " + _CONVERT,
            )
    elif a.ne[1] != b.ne[0]:
        yield _format(
            draft,
            'lora_a tensor is not transposed (hint: adapter from "finetune" example is no longer '
            f"supported): tensor '{pair.target}': expected lora_a [n_in, rank] and lora_b "
            f"[rank, n_out] of one rank, got {_shapes(pair)}",
        )


def experts(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """A and B are matrices, or stacks of as many matrices as the base has experts."""
    a, b = _halves(pair)
    kind = _kind(pair, base)
    n_expert = 1
    if kind is TargetKind.EXPERTS:
        n_expert = base.targets[pair.target].ne[2] if base is not None else a.ne[2]
    if (a.ne[2:], b.ne[2:]) != ((n_expert, 1), (n_expert, 1)):
        yield _mismatch(
            draft,
            f"tensor '{pair.target}' has incorrect shape (hint: maybe wrong base model?): expected "
            f"{n_expert} matrices in lora_a and lora_b (ne[2]) and ne[3] = 1, got {_shapes(pair)}",
            pair.target,
        )


def rank_range(draft: Draft, pair: DraftPair, _base: BaseInfo | None) -> Problems:
    """The rank is one that training gives."""
    rank = _halves(pair)[1].ne[0]
    if not 1 <= rank <= MAX_RANK:
        yield _format(
            draft,
            f"tensor '{pair.target}': expected a rank from 1 to {MAX_RANK}, got {rank}",
            "is it a whole weight? loragraph extract gives an adapter of a smaller rank",
        )


def types(draft: Draft, pair: DraftPair, _base: BaseInfo | None) -> Problems:
    """A and B are of a type that the kernels read."""
    for tensor in _halves(pair):
        if tensor.type not in TYPE_NAMES:
            name = type_name(tensor.type)
            yield UnsupportedError(
                f"{draft.path}: tensor '{tensor.name}': expected type "
                f"{', '.join(TYPE_NAMES.values())}, got {name}",
                what=f"adapter tensors of type {name}",
                hint="convert the adapter with --outtype f16",
            )
            return


def finite(draft: Draft, tensor: TensorInfo, data: Bytes) -> Problems:
    """No value is an infinity or NaN."""
    if not all_finite(tensor.type, data):
        yield _format(
            draft,
            f"tensor '{tensor.name}': expected finite values, got an infinity or NaN",
            "the training diverged, or F16 was too narrow: convert again as F32 or BF16",
        )


FILE_CHECKS: tuple[FileCheck, ...] = (
    general_type,
    architecture,
    adapter_type,
    alpha,
    invocation_tokens,
    tied_output,
    suffixes,
    norms,
    duplicates,
    not_empty,
    tied_magnitude,
)
PAIR_CHECKS: tuple[PairCheck, ...] = (
    complete,
    in_base,
    can_be_changed,
    not_latent,
    shape,
    ranks_agree,
    experts,
    rank_range,
    types,
    vectors,
)
ALONE_CHECKS: tuple[PairCheck, ...] = (in_base, alone_bias, alone_delta)
"""Of vectors without a pair."""
DATA_CHECKS: tuple[DataCheck, ...] = (finite, bias_in_range)


def type_name(type_: int) -> str:
    """Name of a ggml type number."""
    import gguf  # here, because it is slow and only an error message needs it

    try:
        return gguf.GGMLQuantizationType(type_).name
    except ValueError:
        return f"number {type_}"


def header_problems(draft: Draft, base: BaseInfo | None) -> Problems:
    """What the header alone shows, the first problem of each pair."""
    for check in FILE_CHECKS:
        yield from check(draft, base)
    for pair in (*draft.pairs.values(), *draft.alone.values()):
        yield from pair_problems(draft, pair, base)


def pair_problems(draft: Draft, pair: DraftPair, base: BaseInfo | None) -> Problems:
    """The first problem of one pair, or of vectors without one, if any."""
    for check in ALONE_CHECKS if pair.is_alone else PAIR_CHECKS:
        for problem in check(draft, pair, base):
            yield problem
            return


def _halves(pair: DraftPair) -> tuple[TensorInfo, TensorInfo]:
    assert pair.a is not None  # `complete` ran before
    assert pair.b is not None
    return pair.a, pair.b


def _kind(pair: DraftPair, base: BaseInfo | None) -> TargetKind:
    if base is not None:
        return base.targets[pair.target].kind
    a, b = _halves(pair)
    return target_kind(pair.target, (max(a.ne[0], 2), max(b.ne[1], 2), 1, 1))


def _shapes(pair: DraftPair) -> str:
    a, b = _halves(pair)
    return f"lora_a {_shape(a)} and lora_b {_shape(b)}"


def _shape(tensor: TensorInfo) -> list[int]:
    n = next((n for n in (4, 3) if tensor.ne[n - 1] != 1), 2)
    return list(tensor.ne[:n])


def _shown(value: Scalar) -> str:
    return value if isinstance(value, str) else repr(value)


def _format(draft: Draft, message: str, hint: str = "") -> AdapterFormatError:
    return AdapterFormatError(message, path=draft.path, hint=hint)


def _mismatch(draft: Draft, message: str, tensor: str = "", hint: str = "") -> AdapterMismatchError:
    return AdapterMismatchError(message, adapter=str(draft.path), tensor=tensor, hint=hint)
