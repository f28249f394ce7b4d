"""File types (`q4_k_m`, `f16`, …): which ggml type each tensor of a model gets.

The names, and the rule which tensors keep more bits, are those of llama.cpp's quantisation without
an importance matrix (source: llama.cpp, src/llama-quant.cpp, `llama_tensor_get_type`); the tests
compare the result with libllama's own. The types below 3 bits need an importance matrix and are
left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD
from loragraph.errors import ConfigError
from loragraph.ggml.handles import BF16, F16, F32, Q8_0
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import block_values, type_name

Q4_0, Q4_1, Q5_0, Q5_1 = 2, 3, 6, 7
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
IQ4_NL, IQ3_S, IQ4_XS = 20, 21, 23


@dataclass(frozen=True, slots=True)
class FileType:
    """A name of a mix of types, its number in `general.file_type`, the type of most tensors."""

    name: str
    number: int
    default: int


FILE_TYPES: Mapping[str, FileType] = {
    kind.name: kind
    for kind in (
        FileType("f32", 0, F32),
        FileType("f16", 1, F16),
        FileType("bf16", 32, BF16),
        FileType("q8_0", 7, Q8_0),
        FileType("q6_k", 18, Q6_K),
        FileType("q5_k_m", 17, Q5_K),
        FileType("q5_k_s", 16, Q5_K),
        FileType("q5_1", 9, Q5_1),
        FileType("q5_0", 8, Q5_0),
        FileType("q4_k_m", 15, Q4_K),
        FileType("q4_k_s", 14, Q4_K),
        FileType("q4_1", 3, Q4_1),
        FileType("q4_0", 2, Q4_0),
        FileType("iq4_nl", 25, IQ4_NL),
        FileType("iq4_xs", 30, IQ4_XS),
        FileType("q3_k_l", 13, Q3_K),
        FileType("q3_k_m", 12, Q3_K),
        FileType("q3_k_s", 11, Q3_K),
        FileType("q2_k", 10, Q2_K),
    )
}
"""All that can be asked for, best first."""

KEEP = "keep"
_ALIASES = {"q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m"}

_FALLBACKS = {  # where a row is no multiple of 256
    **dict.fromkeys((IQ3_S, IQ4_XS), IQ4_NL),
    **dict.fromkeys((Q2_K, Q3_K), Q4_0),
    Q4_K: Q5_0,
    Q5_K: Q5_1,
    Q6_K: Q8_0,
}

# Parts of names of small or sensitive tensors, which stay as they are.
_NEVER = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel"),
    *("per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight"),
    *("indexer.q_proj.weight", "time_mix_first.weight", "time_mix_decay_w", "attn_rel_b.weight"),
    *("time_mix_lerp_fused.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_"),
    *(".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
    *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1")),
    *(f"time_mix_{part}.weight" for part in ("a2", "g1", "g2")),
)
_NEVER_WHOLE = frozenset({"position_embd.weight", "token_types.weight"})

_log = logging.getLogger("loragraph.tools")


def file_type(name: str) -> FileType | None:
    """The file type of this name, None for "keep"; ConfigError for an unknown one."""
    wanted = name.lower()
    wanted = _ALIASES.get(wanted, wanted)
    if wanted == KEEP:
        return None
    if wanted not in FILE_TYPES:
        known = ", ".join((KEEP, *FILE_TYPES))
        hint = "types below 3 bits need an importance matrix: merge, then run llama-quantize"
        raise ConfigError(f"expected one of {known}, got {name!r}", field="type", hint=hint)
    return FILE_TYPES[wanted]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the rule looks at beside a tensor's name."""

    n_layer: int
    n_expert: int = 0
    n_gqa: int = 1  # query heads that share one K/V head
    is_70b: bool = False  # 80 layers whose 8 query heads share one attn_v


@dataclass(slots=True)
class _State:
    lib: Library
    kind: FileType
    shape: ModelShape
    tied: bool
    n_v: int
    i_v: int = 0
    i_down: int = 0
    fallbacks: list[str] = field(default_factory=list)


def target_types(
    lib: Library,
    kind: FileType,
    tensors: Mapping[str, tuple[int, Sequence[int]]],
    shape: ModelShape,
) -> dict[str, int]:
    """The ggml type of every tensor (name -> present type, sizes in ggml order)."""
    names = sorted(tensors, key=_llama_order)
    n_v = sum(_is_v(name) for name in names)
    state = _State(lib, kind, shape, OUTPUT not in tensors, n_v)
    types = {name: _target_type(state, name, *tensors[name]) for name in names}
    if state.fallbacks:
        _log.warning("other types where rows do not fit the blocks: %s", state.fallbacks[0])
    return types


def _llama_order(name: str) -> tuple[int, str]:
    """libllama goes through tensors by layer, then by name; counters of the rule follow that."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


def is_quantisable(name: str, ne: Sequence[int]) -> bool:
    """Whether llama.cpp would quantise the tensor: matrices and expert stacks called weight."""
    n_dims = max((i + 1 for i, n in enumerate(ne) if n > 1), default=1)
    if n_dims < 2 or not name.endswith("weight") or name in _NEVER_WHOLE:
        return False
    return not any(part in name for part in _NEVER)


def _target_type(state: _State, name: str, present: int, ne: Sequence[int]) -> int:
    if not is_quantisable(name, ne):
        return present
    wanted = state.kind.default
    if wanted in (F32, F16, BF16):
        return wanted
    wanted = _mixed(state, name, ne)
    block = block_values(state.lib, wanted)
    if ne[0] % block:
        fallback = _FALLBACKS.get(wanted, wanted)
        fallback = F16 if ne[0] % block_values(state.lib, fallback) else fallback
        state.fallbacks.append(f"{name} {type_name(state.lib, fallback)}")
        return fallback
    return wanted


def _mixed(state: _State, name: str, ne: Sequence[int]) -> int:
    """The type by the tensor's part in the model."""
    default = state.kind.default
    is_table = name in (TOKEN_EMBD, "per_layer_token_embd.weight")
    if name == OUTPUT or (is_table and state.tied):
        if ne[0] % block_values(state.lib, default):
            return Q8_0
        return default if default == Q8_0 else Q6_K
    if is_table:
        return default
    if _is_v(name):
        return _type_of_v(state)
    if "attn_k.weight" in name and state.shape.n_expert == 8:
        return Q8_0
    if "ffn_down" in name:
        return _type_of_down(state, name)
    if "attn_output.weight" in name:
        return _type_of_output(state)
    return default


def _is_v(name: str) -> bool:
    return any(part in name for part in ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight"))


def _type_of_v(state: _State) -> int:
    kind, gqa, i = state.kind.name, state.shape.n_gqa, state.i_v
    wanted = state.kind.default
    if kind == "q2_k":
        wanted = Q4_K if gqa >= 4 else Q3_K
    elif kind == "q3_k_m":
        wanted = Q5_K if i < 2 else Q4_K
    elif kind == "q3_k_l" or (kind in ("iq4_nl", "iq4_xs") and gqa >= 4):
        wanted = Q5_K
    elif kind in ("q4_k_m", "q5_k_m") and _more_bits(i, state.n_v):
        wanted = Q6_K
    elif kind == "q4_k_s" and i < 4:
        wanted = Q5_K
    if state.shape.is_70b and wanted in (Q3_K, Q4_K):
        wanted = Q5_K
    if state.shape.n_expert == 8:
        wanted = Q8_0
    state.i_v += 1
    return wanted


def _type_of_down(state: _State, name: str) -> int:
    kind, n = state.kind.name, state.shape.n_layer
    i, state.i_down = state.i_down, state.i_down + 1
    if state.shape.n_expert > 1:
        i = _llama_order(name)[0]
    first = i < n // 8
    special: dict[str, int | None] = {
        "q2_k": Q3_K,
        "q3_k_m": Q5_K if i < n // 16 else Q4_K,
        "q3_k_l": Q5_K,
        "q4_k_m": Q6_K if _more_bits(i, n) else None,
        "q5_k_m": Q6_K if _more_bits(i, n) else None,
        "q4_k_s": Q5_K if first else None,
        "iq4_nl": Q5_K if first else None,
        "iq4_xs": Q5_K if first else None,
    }
    return special.get(kind) or state.kind.default


def _type_of_output(state: _State) -> int:
    kind = state.kind.name
    if state.shape.n_expert == 8:
        five = {"q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq4_xs"}
        return Q5_K if kind in five else state.kind.default
    return {"q2_k": Q3_K, "q3_k_m": Q4_K, "q3_k_l": Q5_K}.get(kind, state.kind.default)


def _more_bits(i: int, n: int) -> bool:
    """The first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
