"""GGUF metadata -> the numbers of a model, with llama.cpp's defaults (llama-model.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.ops import Rope

MAX_LAYERS = 1024
_MAX_SIZE = 1 << 24  # no embedding, head or feed-forward width comes near
_MAX_REAL = 3e38  # about the largest f32
_ROPE_FACTORS = (2.0**-10, 2.0**20)  # outside, YaRN's corrections leave f32


@dataclass(frozen=True, slots=True)
class HParams:
    """The numbers of a model that its graph needs; tuples hold one value a layer."""

    arch: str
    name: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_embd_head: int
    n_expert: int
    n_expert_used: int
    norm_rms_eps: float
    rope: Rope

    def n_embd_kv(self, il: int) -> int:
        """Width of a K or V row in layer `il`."""
        return self.n_head_kv[il] * self.n_embd_head


def read_hparams(file: GGUFFile, rope_mode: int) -> HParams:
    """The generic keys `<arch>.*`; `rope_mode` is the family's pairing (0 norm, 2 neox).

    Raises GGUFError for a missing, mistyped or absurd key.
    """
    arch = file.string("general.architecture")
    n_layer = file.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    n_embd = file.integer(f"{arch}.embedding_length", low=1, high=_MAX_SIZE)
    n_head = _per_layer(file, f"{arch}.attention.head_count", n_layer)
    n_head_kv = _per_layer(file, f"{arch}.attention.head_count_kv", n_layer, default=n_head)
    for il, (heads, heads_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if heads % heads_kv:
            raise GGUFError(
                f"expected the number of heads to be a multiple of the K/V heads, "
                f"got {heads} and {heads_kv} in layer {il}",
                path=file.path,
                where=f"{arch}.attention.head_count_kv",
            )
    n_embd_head = _head_size(file, arch, n_embd, n_head[0])
    n_ctx_train = file.integer(f"{arch}.context_length", low=1)
    return HParams(
        arch=arch,
        name=file.string("general.name", default=file.path.stem),
        n_vocab=_n_vocab(file, arch),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=_per_layer(file, f"{arch}.feed_forward_length", n_layer),
        n_embd_head=n_embd_head,
        n_expert=file.integer(f"{arch}.expert_count", default=0, high=4096),
        n_expert_used=file.integer(f"{arch}.expert_used_count", default=0, high=4096),
        norm_rms_eps=_real(file, f"{arch}.attention.layer_norm_rms_epsilon", low=0),
        rope=_rope(file, arch, n_embd_head, n_ctx_train, rope_mode),
    )


def _per_layer(
    file: GGUFFile, key: str, n_layer: int, default: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """A key that holds one number for all layers or an array with one number a layer."""
    if key not in file and default is not None:
        return default
    if not file.type_of(key).startswith("array"):
        return (file.integer(key, low=1, high=_MAX_SIZE),) * n_layer
    values = file.numbers(key)
    if len(values) != n_layer or values.dtype.kind not in "iu":
        raise GGUFError(
            f"expected {n_layer} integers, one a layer, got {file.type_of(key)} "
            f"of length {len(values)}",
            path=file.path,
            where=key,
        )
    numbers = tuple(int(value) for value in values)
    if not all(1 <= number <= _MAX_SIZE for number in numbers):
        raise GGUFError(
            f"expected values from 1 to {_MAX_SIZE}, got {min(numbers)} to {max(numbers)}",
            path=file.path,
            where=key,
        )
    return numbers


def _head_size(file: GGUFFile, arch: str, n_embd: int, n_head: int) -> int:
    key_length = f"{arch}.attention.key_length"
    if key_length not in file and n_embd % n_head:
        raise GGUFError(
            f"expected an embedding length that is a multiple of the {n_head} heads, got {n_embd}",
            path=file.path,
            where=f"{arch}.embedding_length",
        )
    n_k = file.integer(key_length, default=n_embd // n_head, low=1, high=_MAX_SIZE)
    n_v = file.integer(
        f"{arch}.attention.value_length", default=n_embd // n_head, low=1, high=_MAX_SIZE
    )
    if n_k != n_v:
        raise UnsupportedError(
            f"{file.path}: K heads of {n_k} and V heads of {n_v} values",
            what="unlike K and V heads",
        )
    return n_k


def _n_vocab(file: GGUFFile, arch: str) -> int:
    """The tokens there are; as in llama.cpp, the key counts only where there are none."""
    key, tokens = f"{arch}.vocab_size", "tokenizer.ggml.tokens"
    if tokens not in file and key in file:
        return file.integer(key, low=1)
    return max(1, file.array_length(tokens))


def _real(
    file: GGUFFile,
    key: str,
    default: float | None = None,
    *,
    low: float = -_MAX_REAL,
    high: float = _MAX_REAL,
) -> float:
    """A number in [low, high], which ggml takes as f32."""
    value = file.real(key, default)
    if not low <= value <= high:
        raise GGUFError(
            f"expected a value from {low:g} to {high:g}, got {value:g}", path=file.path, where=key
        )
    return value


def _rope(file: GGUFFile, arch: str, n_embd_head: int, n_ctx_train: int, mode: int) -> Rope:
    n_rot = file.integer(f"{arch}.rope.dimension_count", default=n_embd_head, low=1)
    if n_rot != n_embd_head or n_rot % 2:
        raise GGUFError(
            f"invalid n_rot: {n_rot}, expected {n_embd_head} (even)",
            path=file.path,
            where=f"{arch}.rope.dimension_count",
        )
    kind = file.string(f"{arch}.rope.scaling.type", default="linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.path}: {arch}.rope.scaling.type: expected none, linear or yarn, got {kind!r}",
            what=f"rope scaling {kind}",
        )
    factor = _rope_factor(file, arch)
    freq_base = _real(file, f"{arch}.rope.freq_base", default=10000.0, low=1e-30)
    freq_scale = (
        1.0 if factor == 0.0 or kind == "none" else float(np.float32(1) / np.float32(factor))
    )
    yarn = kind == "yarn"
    attn_factor = _real(file, f"{arch}.rope.scaling.attn_factor", default=1.0)
    return Rope(
        n_rot=n_rot,
        mode=mode,
        n_ctx_orig=file.integer(
            f"{arch}.rope.scaling.original_context_length", default=0, high=2**31 - 1
        )
        or n_ctx_train,
        freq_base=freq_base,
        freq_scale=freq_scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=attn_factor * (_yarn_attn_factor(freq_scale) if yarn else 1.0),
    )


def _rope_factor(file: GGUFFile, arch: str) -> float:
    """The stretch of positions; 0 = none, as in llama.cpp."""
    key, old_key = f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"
    key = old_key if key not in file and old_key in file else key
    low, high = _ROPE_FACTORS
    if file.real(key, default=0.0) == 0:
        return 0.0
    return _real(file, key, low=low, high=high)


def _yarn_attn_factor(freq_scale: float) -> float:
    """What llama-context.cpp hands to ggml, in float32: ggml itself multiplies by 1 + 0.1 ln(f).

    The keys yarn_log_multiplier and yarn_beta_* belong to other families and are read there.
    """
    one, tenth = np.float32(1), np.float32(0.1)
    factor = one / np.float32(freq_scale)
    mscale = one if factor <= 1 else tenth * np.log(factor) + one
    return float(mscale * (one / (one + tenth * np.log(factor))))
