"""The error table: wrong files, and what their errors must be and say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loragraph.adapters.checks import MAX_RANK
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    GGUFError,
    LoragraphError,
    UnsupportedError,
)
from tests.adapters.raw_gguf import (
    F16,
    F32,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_VOCAB,
    Raw,
    good_tensors,
    pair,
    tensor,
)

Q, UP = "blk.0.attn_q.weight", "blk.0.ffn_up.weight"
EXPS, EMBD = "blk.0.ffn_up_exps.weight", "token_embd.weight"


@dataclass(frozen=True)
class Row:
    """A wrong file, and what its error must be and say."""

    name: str
    error: type[LoragraphError]
    phrases: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Raw] | list[tuple[str, Raw]] | None = None
    fits_any: bool = False  # without a base nothing is wrong


def _with(name: str, raw: Raw) -> dict[str, Raw]:
    return good_tensors() | {name: raw}


def _placed(half: str, offset: int) -> dict[str, Raw]:
    """A right adapter in which one tensor's data is said to stand at `offset`."""
    tensors = good_tensors()
    return tensors | {f"{Q}.{half}": replace(tensors[f"{Q}.{half}"], offset=offset)}


def _value(value: float, type_: Any = F32) -> dict[str, Raw]:
    b = np.ones((N_EMBD, 4), np.float32)
    b[3, 2] = value
    return good_tensors() | {f"{Q}.lora_b": tensor(b, type_)}


def _q8_with_infinite_scale() -> dict[str, Raw]:
    block = np.full(34, 1, np.uint8)
    block[:2] = (0x00, 0x7C)  # F16 infinity
    return {
        f"{Q}.lora_a": Raw((N_EMBD, 32), 8, np.tile(block, 2 * 32).tobytes()),
        f"{Q}.lora_b": Raw((32, N_EMBD), 8, np.tile(block, N_EMBD).tobytes()),
    }


def _ones(*shape: int) -> Raw:
    return tensor(np.ones(shape, np.float32))


ROWS = [
    Row(
        "general.type",
        AdapterFormatError,
        ("expect general.type to be 'adapter', but got: model",),
        {"general__type": "model"},
    ),
    Row(
        "general.type missing",
        AdapterFormatError,
        ("expect general.type to be 'adapter', but got: ",),
        {"general__type": None},
    ),
    Row(
        "general.type a number",
        AdapterFormatError,
        ("expect general.type to be 'adapter', but got: 3",),
        {"general__type": 3},
    ),
    Row(
        "architecture",
        AdapterMismatchError,
        ("model arch and LoRA arch mismatch", "'llama'", "qwen2"),
        {"general__architecture": "qwen2"},
        fits_any=True,
    ),
    Row(
        "adapter.type",
        AdapterFormatError,
        ("expect adapter.type to be 'lora', but got: control_vector",),
        {"adapter__type": "control_vector"},
    ),
    Row(
        "alpha a string",
        AdapterFormatError,
        ("invalid gguf type for adapter.lora.alpha", "expected f32, got string"),
        {"adapter__lora__alpha": "16"},
    ),
    Row(
        "alpha an array",
        AdapterFormatError,
        ("invalid gguf type for adapter.lora.alpha", "got array of u32"),
        {"adapter__lora__alpha": [16]},
    ),
    Row(
        "alpha a bool",
        AdapterFormatError,
        ("invalid gguf type for adapter.lora.alpha", "got bool"),
        {"adapter__lora__alpha": True},
    ),
    Row(
        "alpha NaN",
        AdapterFormatError,
        ("adapter.lora.alpha", "finite", "nan"),
        {"adapter__lora__alpha": float("nan")},
    ),
    Row(
        "alpha beyond f32",
        AdapterFormatError,
        ("adapter.lora.alpha", "finite", "inf"),
        {"adapter__lora__alpha": np.float64(1e300)},
    ),
    Row(
        "invocation tokens no array",
        AdapterFormatError,
        ("invalid gguf type for adapter.alora.invocation_tokens",),
        {"adapter__alora__invocation_tokens": 5},
    ),
    Row(
        "invocation tokens of strings",
        AdapterFormatError,
        ("invalid gguf element type for adapter.alora.invocation_tokens", "array of string"),
        {"adapter__alora__invocation_tokens": ["a"]},
    ),
    Row(
        "invocation tokens of i32",
        AdapterFormatError,
        ("invalid gguf element type for adapter.alora.invocation_tokens", "array of i32"),
        {"adapter__alora__invocation_tokens": np.array([1], np.int32)},
    ),
    Row(
        "invocation tokens empty",
        AdapterFormatError,
        ("adapter.alora.invocation_tokens", "at least one token"),
        {"adapter__alora__invocation_tokens": np.empty(0, np.uint32)},
    ),
    Row(
        "tied_output a string",
        AdapterFormatError,
        ("invalid gguf type for loragraph.adapter.tied_output", "expected bool, got string"),
        {"loragraph__adapter__tied_output": "yes"},
    ),
    Row(
        "unexpected suffix",
        AdapterFormatError,
        ("LoRA tensor 'blk.0.attn_q.weight.lora_c' has unexpected suffix",),
        tensors=_with(f"{Q}.lora_c", _ones(4, 4)),
    ),
    Row(
        "plain weight",
        AdapterFormatError,
        ("LoRA tensor 'output.weight' has unexpected suffix",),
        tensors=_with("output.weight", _ones(4, 4)),
    ),
    Row(
        "norm weight",
        AdapterFormatError,
        ("'blk.0.attn_norm.weight' has unexpected suffix", "norm weight", "ignore_norm=True"),
        tensors=_with("blk.0.attn_norm.weight", _ones(N_EMBD)),
    ),
    Row(
        "two names for one half",
        AdapterFormatError,
        ("'blk.0.attn_q.weight.lora_a.lora_a' is a duplicate",),
        tensors=_with(f"{Q}.lora_a.lora_a", _ones(4, N_EMBD)),
    ),
    Row(
        "the same name twice",
        GGUFError,
        ("duplicate tensor name",),
        tensors=[*good_tensors().items(), *pair(Q).items()],
    ),
    Row(
        "names alike up to a NUL",
        GGUFError,
        ("duplicate tensor name",),
        tensors=good_tensors() | {"x.lora_a\0": _ones(4, 4), "x.lora_a\0y": _ones(4, 4)},
    ),
    Row(
        "no tensors",
        AdapterFormatError,
        ("expected at least one pair", "would change nothing"),
        tensors={},
    ),
    Row(
        "b missing",
        AdapterFormatError,
        ("LoRA tensor pair for 'blk.0.attn_q.weight' is missing one component: lora_b",),
        tensors={f"{Q}.lora_a": _ones(4, N_EMBD)},
    ),
    Row(
        "a missing",
        AdapterFormatError,
        ("LoRA tensor pair for 'blk.0.attn_q.weight' is missing one component: lora_a",),
        tensors={f"{Q}.lora_b": _ones(N_EMBD, 4)},
    ),
    Row(
        "not in the base",
        AdapterMismatchError,
        (
            "LoRA tensor 'blk.7.attn_q.weight' does not exist in base model "
            "(hint: maybe wrong base model?)",
        ),
        tensors=pair("blk.7.attn_q.weight"),
        fits_any=True,
    ),
    Row(
        "a norm as target",
        AdapterMismatchError,
        ("'blk.0.attn_norm.weight' would change nothing",),
        tensors=pair("blk.0.attn_norm.weight", n_out=1),
        fits_any=True,
    ),
    Row(
        "a bias as target",
        AdapterMismatchError,
        ("'blk.0.attn_q.bias' would change nothing",),
        tensors=pair("blk.0.attn_q.bias", n_out=1),
        fits_any=True,
    ),
    Row(
        "rope_freqs as target",
        AdapterMismatchError,
        ("'rope_freqs.weight' would change nothing",),
        tensors=pair("rope_freqs.weight", n_in=8, n_out=1),
        fits_any=True,
    ),
    Row(
        "n_in",
        AdapterMismatchError,
        (
            "tensor 'blk.0.attn_q.weight' has incorrect shape (hint: maybe wrong base model?)",
            "expected lora_a [64, rank] and lora_b [rank, 64]",
            "got lora_a [32, 4] and lora_b [4, 64]",
        ),
        tensors=pair(Q, n_in=32),
        fits_any=True,
    ),
    Row(
        "n_out",
        AdapterMismatchError,
        ("has incorrect shape (hint: maybe wrong base model?)", "lora_b [4, 65]"),
        tensors=pair(Q, n_out=65),
        fits_any=True,
    ),
    Row(
        "token table n_vocab",
        AdapterMismatchError,
        (
            "tensor 'token_embd.weight' has incorrect shape (hint: maybe wrong base model?)",
            "expected lora_a [rank, 128] and lora_b [rank, 64]",
        ),
        tensors=pair(EMBD, n_out=N_VOCAB + 1),
        fits_any=True,
    ),
    Row(
        "token table in the form of a linear layer",
        AdapterMismatchError,
        ("tensor 'token_embd.weight' has incorrect shape",),
        tensors={f"{EMBD}.lora_a": _ones(4, N_EMBD), f"{EMBD}.lora_b": _ones(N_VOCAB, 4)},
    ),
    Row(
        "a not transposed",
        AdapterFormatError,
        (
            'lora_a tensor is not transposed (hint: adapter from "finetune" example is no longer '
            "supported)",
            "got lora_a [64, 4] and lora_b [8, 64]",
        ),
        tensors={f"{Q}.lora_a": _ones(4, N_EMBD), f"{Q}.lora_b": _ones(N_EMBD, 8)},
    ),
    Row(
        "token table ranks",
        AdapterFormatError,
        ("expected one rank in lora_a and lora_b", "lora_a [4, 128] and lora_b [8, 64]"),
        tensors={f"{EMBD}.lora_a": _ones(N_VOCAB, 4), f"{EMBD}.lora_b": _ones(N_EMBD, 8)},
    ),
    Row(
        "number of experts",
        AdapterMismatchError,
        ("expected 3 matrices", "lora_a [64, 4, 2]"),
        tensors=pair(EXPS, n_out=N_FF, n_expert=N_EXPERT - 1),
        fits_any=True,
    ),
    Row(
        "number of experts differs in a and b",
        AdapterMismatchError,
        ("matrices in lora_a and lora_b",),
        tensors={
            f"{EXPS}.lora_a": _ones(N_EXPERT, 4, N_EMBD),
            f"{EXPS}.lora_b": _ones(N_EXPERT + 1, N_FF, 4),
        },
    ),
    Row(
        "a matrix for experts",
        AdapterMismatchError,
        ("expected 3 matrices",),
        tensors=pair(EXPS, n_out=N_FF),
        fits_any=True,
    ),
    Row(
        "experts for a matrix",
        AdapterMismatchError,
        ("expected 1 matrices",),
        tensors=pair(Q, n_expert=N_EXPERT),
    ),
    Row(
        "four dimensions",
        AdapterMismatchError,
        ("ne[3] = 1", "lora_b [4, 64, 1, 2]"),
        tensors={f"{Q}.lora_a": _ones(4, N_EMBD), f"{Q}.lora_b": _ones(2, 1, N_EMBD, 4)},
    ),
    Row(
        "absurd rank",
        AdapterFormatError,
        (f"expected a rank from 1 to {MAX_RANK}, got {MAX_RANK + 1}",),
        tensors=pair(Q, rank=MAX_RANK + 1, type_=F16),
    ),
    Row(
        "rank 0",
        GGUFError,
        ("expected sizes of at least 1",),
        tensors={f"{Q}.lora_a": Raw((N_EMBD, 0), 0, b""), f"{Q}.lora_b": Raw((0, N_EMBD), 0, b"")},
    ),
    Row(
        "type Q4_0",
        UnsupportedError,
        ("expected type F32, F16, BF16, Q8_0, got Q4_0", "--outtype f16"),
        tensors={
            f"{Q}.lora_a": Raw((N_EMBD, 32), 2, bytes(18 * 2 * 32)),
            f"{Q}.lora_b": Raw((32, N_EMBD), 2, bytes(18 * N_EMBD)),
        },
    ),
    Row(
        "type I32",
        UnsupportedError,
        ("got I32",),
        tensors=pair(Q) | {f"{Q}.lora_b": Raw((4, N_EMBD), 26, bytes(4 * 4 * N_EMBD))},
    ),
    Row(
        "magnitude of another length",
        AdapterFormatError,
        ("one value for each of the 64 rows", "lora_magnitude"),
        tensors=_with(f"{Q}.lora_magnitude", tensor(np.ones(5))),
    ),
    Row(
        "magnitude of another type",
        AdapterFormatError,
        ("expected type F32", "lora_magnitude"),
        tensors=_with(f"{Q}.lora_magnitude", tensor(np.ones(N_EMBD), F16)),
    ),
    Row(
        "magnitude without a pair",
        AdapterFormatError,
        ("missing one component", "blk.0.ffn_gate.weight"),
        tensors=_with("blk.0.ffn_gate.weight.lora_magnitude", tensor(np.ones(N_FF))),
    ),
    Row(
        "bias alone of a weight that the base lacks",
        AdapterMismatchError,
        ("does not exist in base model", "blk.0.ffn_gate.weight"),
        tensors=_with("blk.0.ffn_gate.weight.lora_bias", tensor(np.ones(N_FF))),
        fits_any=True,
    ),
    Row(
        "bias alone of another length",
        AdapterMismatchError,
        ("incorrect shape", f"expected {N_VOCAB} values, got 5", "output.weight.lora_bias"),
        tensors=_with("output.weight.lora_bias", tensor(np.ones(5))),
        fits_any=True,
    ),
    Row(
        "bias alone of two rows",
        AdapterFormatError,
        ("expected one row of F32", "output.weight.lora_bias"),
        tensors=_with("output.weight.lora_bias", tensor(np.ones((2, N_VOCAB)))),
    ),
    Row(
        "bias alone of experts",
        AdapterMismatchError,
        ("would change nothing", "kind 'experts'", "ffn_up_exps"),
        tensors=_with("blk.0.ffn_up_exps.weight.lora_bias", tensor(np.ones(N_FF))),
        fits_any=True,
    ),
    Row(
        "bias alone of the lookup",
        AdapterMismatchError,
        ("would change nothing", "kind 'embedding'", "token_embd"),
        tensors=_with("token_embd.weight.lora_bias", tensor(np.ones(N_EMBD))),
        fits_any=True,
    ),
    Row(
        "bias alone of a norm",
        AdapterMismatchError,
        ("would change nothing", "kind 'none'", "output_norm"),
        tensors=_with("output_norm.weight.lora_bias", tensor(np.ones(N_EMBD))),
        fits_any=True,
    ),
    Row(
        "norm's change of a weight that is none",
        AdapterFormatError,
        ("the change of a norm's weight", "output.weight.lora_delta"),
        tensors=_with("output.weight.lora_delta", tensor(np.ones(N_VOCAB))),
    ),
    Row(
        "norm's change beside a pair",
        AdapterFormatError,
        ("a norm's weight has no low-rank pair", f"{Q}.lora_delta"),
        tensors=_with(f"{Q}.lora_delta", tensor(np.ones(N_EMBD))),
    ),
    Row(
        "norm's change of another length",
        AdapterMismatchError,
        ("incorrect shape", f"expected {N_EMBD} values, got 5", "output_norm"),
        tensors=_with("output_norm.weight.lora_delta", tensor(np.ones(5))),
        fits_any=True,
    ),
    Row(
        "norm's change of another type",
        AdapterFormatError,
        ("expected one row of F32", "output_norm"),
        tensors=_with("output_norm.weight.lora_delta", tensor(np.ones(N_EMBD), F16)),
    ),
    Row(
        "norm's change with NaN",
        AdapterFormatError,
        ("finite values", "output_norm"),
        tensors=_with("output_norm.weight.lora_delta", tensor(np.full(N_EMBD, np.nan))),
    ),
    Row(
        "norm's change of another layer",
        AdapterMismatchError,
        ("does not exist in base model", "blk.9.attn_norm.weight"),
        tensors=_with("blk.9.attn_norm.weight.lora_delta", tensor(np.ones(N_EMBD))),
        fits_any=True,
    ),
    Row(
        "norm's change of zeros alone",
        AdapterFormatError,
        ("would change nothing",),
        tensors={"output_norm.weight.lora_delta": tensor(np.zeros(N_EMBD))},
    ),
    Row(
        "bias with an infinity",
        AdapterFormatError,
        ("finite values", "lora_bias"),
        tensors=_with(f"{Q}.lora_bias", tensor(np.full(N_EMBD, np.inf))),
    ),
    Row(
        "bias beyond f32",
        AdapterFormatError,
        ("leave the range of f32", "lora_bias"),
        {"adapter.lora.alpha": 400.0},
        tensors=_with(f"{Q}.lora_bias", tensor(np.full(N_EMBD, 3e38))),
    ),
    Row("F32 NaN", AdapterFormatError, ("finite values",), tensors=_value(float("nan"))),
    Row("F32 infinity", AdapterFormatError, ("finite values",), tensors=_value(float("-inf"))),
    Row("F16 infinity", AdapterFormatError, ("finite values",), tensors=_value(np.inf, F16)),
    Row(
        "Q8_0 infinity",
        AdapterFormatError,
        ("finite values",),
        tensors=_q8_with_infinite_scale(),
    ),
    Row(
        "B all zeros",
        AdapterFormatError,
        ("would change nothing", "untrained"),
        tensors=pair(Q) | {f"{Q}.lora_b": tensor(np.full((N_EMBD, 4), -0.0))},
    ),
    Row(
        "A all zeros",
        AdapterFormatError,
        ("would change nothing",),
        tensors=pair(Q) | {f"{Q}.lora_a": tensor(np.zeros((4, N_EMBD)))},
    ),
    Row(
        "sizes that overflow",
        GGUFError,
        ("overflow",),
        tensors={f"{Q}.lora_a": Raw((2**62, 2**62), 0, bytes(32))},
    ),
    Row(
        "terabytes",
        GGUFError,
        ("data is not within the file bounds, file is corrupted or incomplete",),
        tensors={f"{Q}.lora_a": Raw((N_EMBD, 2**40), 0, bytes(32))},
    ),
    Row(
        "tensors that overlap",
        GGUFError,
        ("not a readable GGUF file", f"'{Q}.lora_b' has offset 0, expected {4 * 4 * N_EMBD}"),
        tensors=_placed("lora_b", 0),
    ),
    Row(
        "tensors that overlap in part",
        GGUFError,
        ("not a readable GGUF file", f"'{Q}.lora_b' has offset 512, expected {4 * 4 * N_EMBD}"),
        tensors=_placed("lora_b", 512),
    ),
    Row(
        "a hole between tensors",
        GGUFError,
        ("not a readable GGUF file", f"'{Q}.lora_b' has offset 2048, expected {4 * 4 * N_EMBD}"),
        tensors=_placed("lora_b", 2048),
    ),
    Row(
        "data beyond the end",
        GGUFError,
        ("not a readable GGUF file", "has offset 1048576"),
        tensors=_placed("lora_a", 1 << 20),
    ),
]
