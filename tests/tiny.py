"""Tiny random models and adapters for them, as GGUF, from a seed.

Equal arguments give equal bytes. Weights are scaled so that activations stay near 1 and logits
spread with a standard deviation of 1 to 3: errors and adapters are visible, nothing overflows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from gguf import GGMLQuantizationType

from tests.gguf_bytes import (
    Array,
    Metadata,
    RawTensor,
    Value,
    gguf_bytes,
    quantised,
    tensor,
    write_gguf,
)
from tests.reference.adapter import AdapterArrays, dequantised
from tests.tiny_vocab import CHAT_TEMPLATE, bpe_metadata, spm_metadata

F32 = GGMLQuantizationType.F32
QKV = ("attn_q", "attn_k", "attn_v")
ATTENTION_TARGETS = (*QKV, "attn_output")
FFN_TARGETS = ("ffn_gate", "ffn_up", "ffn_down")
LINEAR_TARGETS = ATTENTION_TARGETS + FFN_TARGETS

__all__ = [
    "ATTENTION_TARGETS",
    "CHAT_TEMPLATE",
    "FFN_TARGETS",
    "LINEAR_TARGETS",
    "QKV",
    "TinyAdapter",
    "TinyLlama",
    "TinyModel",
    "gguf_bytes",
    "random_normal",
    "random_uniform",
    "tensor",
    "write_adapter_raw",
]


@dataclass(frozen=True)
class TinyModel:
    """What the tiny models of all families share; `tests/tiny_families.py` has the others.

    K-quants and IQ types need rows of 256: n_embd, n_ff and n_head * head_dim multiples of 256.
    """

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_vocab: int = 320
    tied: bool = False
    attn_bias: bool = False  # biases of q, k, v and attn_output
    qkv_bias: bool = False  # of q, k and v alone
    ffn_bias: bool = False  # biases of gate, up and down
    fused_qkv: bool = False  # q, k and v as one matrix attn_qkv
    biases_apart: bool = False  # though they are: attn_q.bias and so on
    rope_freqs: bool = False  # the tensor rope_freqs.weight (n_rot / 2) f32
    long_factors: bool = False  # longrope's tensors, whether the type says so or not
    rope_scaling: Literal["linear", "yarn", "longrope"] | None = None
    rope_factor: float = 4.0
    rope_orig_ctx: int = 128
    rope_base: float = 10000.0
    scales: bool | Sequence[str] = False  # the F32 [1] tensors <name>.scale of all or some weights
    head_dim: int = 0  # 0 = n_embd / n_head
    rope_dim: int = 0  # 0 = head_dim, the only value that libllama accepts for most families
    n_ctx_train: int = 512
    rms_eps: float = 1e-5
    weight_type: GGMLQuantizationType = F32  # of all matrices
    types: Mapping[str, GGMLQuantizationType] = field(
        default_factory=dict
    )  # by name, e.g. "output"
    vocab: Literal["spm", "bpe", "none"] = "spm"
    extra: Mapping[str, Value] = field(default_factory=dict)  # further or overriding metadata
    seed: int = 0

    arch: ClassVar[str]

    @property
    def n_rot(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.n_embd // self.n_head

    def block_matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes (n_out, n_in), or (n_expert, n_out, n_in), of a layer's matrices by short name."""
        n_q, n_kv = self.n_head * self.n_rot, self.n_head_kv * self.n_rot
        apart = {name: (n, self.n_embd) for name, n in zip(QKV, (n_q, n_kv, n_kv), strict=True)}
        return {
            **({"attn_qkv": (n_q + 2 * n_kv, self.n_embd)} if self.fused_qkv else apart),
            "attn_output": (self.n_embd, n_q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }

    def block_norms(self) -> dict[str, int]:
        """Widths of a layer's norm weights by short name."""
        return {"attn_norm": self.n_embd, "ffn_norm": self.n_embd}

    def block_biases(self) -> tuple[str, ...]:
        """Short names of the matrices that have a bias."""
        qkv = self.qkv_biases() * (self.attn_bias or self.qkv_bias)
        return qkv + ("attn_output",) * self.attn_bias + FFN_TARGETS * self.ffn_bias

    def qkv_biases(self) -> tuple[str, ...]:
        """The biases of q, k and v, if there are any."""
        return ("attn_qkv",) if self.fused_qkv and not self.biases_apart else QKV

    @property
    def scaled(self) -> Sequence[str]:
        """Short names of the matrices that have a factor w_s."""
        if isinstance(self.scales, bool):
            return self.targets * self.scales
        return [name for name in self.targets if name in self.scales]

    def own_keys(self) -> dict[str, Value]:
        """The family's own metadata, without `<arch>.`."""
        return {}

    def own_vectors(self) -> dict[str, Array]:
        """The family's own vectors that belong to no layer, by GGUF name."""
        return {}

    def embedding_gain(self) -> float:
        """What the graph multiplies the looked-up rows by."""
        return 1.0

    @property
    def targets(self) -> tuple[str, ...]:
        """Short names of a layer's matrices: what an adapter may change."""
        return tuple(self.block_matrices())

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shape of every matrix by GGUF name, in file order."""
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.n_vocab, self.n_embd)}
        if not self.tied:
            shapes["output.weight"] = (self.n_vocab, self.n_embd)
        block = self.block_matrices()
        for il in range(self.n_layer):
            shapes |= {f"blk.{il}.{name}.weight": shape for name, shape in block.items()}
        return shapes

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """Every tensor before quantisation, numpy order, by GGUF name."""
        out = {name: self._matrix(name, shape) for name, shape in self.matrices().items()}
        out["output_norm.weight"] = self._near_one("output_norm.weight", self.n_embd)
        if self.rope_freqs:
            out["rope_freqs.weight"] = self.divisors("rope_freqs")
        if self.long_factors:
            out["rope_factors_long.weight"] = self.divisors("rope_factors_long", 30.0)
            out["rope_factors_short.weight"] = self.divisors("rope_factors_short", 1.5)
        out |= self.own_vectors()
        apart = replace(self, fused_qkv=False).block_matrices() | self.block_matrices()
        for il in range(self.n_layer):
            for norm, n in self.block_norms().items():
                name = f"blk.{il}.{norm}.weight"
                out[name] = self._near_one(name, n)
            for target in self.block_biases():
                name = f"blk.{il}.{target}.bias"
                out[name] = self.bias(name, apart[target][-2])
            for target in self.scaled:
                name = f"blk.{il}.{target}.scale"
                if f"blk.{il}.{target}.weight" not in out:  # layers may be unlike
                    continue
                out[name] = _rng(self.seed, name).uniform(0.5, 1.5, 1).astype(np.float32)
        return out

    def divisors(self, name: str, most: float = 4.0) -> Array:
        """Random rope factors."""
        n = (self.rope_dim or self.n_rot) // 2
        return _rng(self.seed, name).uniform(1, most, n).astype(np.float32)

    def bias(self, name: str, n: int) -> Array:
        """A random bias."""
        return np.float32(0.3) * _normal(self.seed, name, (n,))

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Array:
        # 2 / sqrt(n_embd) behind a normalised activation gives logits of standard deviation 2.
        is_head = name == "output.weight" or (self.tied and name == "token_embd.weight")
        is_lookup = name == "token_embd.weight" and not self.tied
        std = (
            1.0 / self.embedding_gain()
            if is_lookup
            else (2.0 if is_head else 1.0) / np.sqrt(shape[-1])
        )
        return np.float32(std) * _normal(self.seed, name, shape)

    def _near_one(self, name: str, n: int) -> Array:
        return 1 + np.float32(0.1) * _normal(self.seed, name, (n,))

    def metadata(self) -> dict[str, Value]:
        """Keys of the file; `extra` comes last and overrides."""
        own: dict[str, Value] = {
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.dimension_count": self.rope_dim or self.n_rot,
            "rope.freq_base": self.rope_base,
            "vocab_size": self.n_vocab,
        }
        if self.head_dim:
            own |= {
                "attention.key_length": self.head_dim,
                "attention.value_length": self.head_dim,
            }
        if self.rope_scaling:
            own |= {
                "rope.scaling.type": self.rope_scaling,
                "rope.scaling.factor": self.rope_factor,
                "rope.scaling.original_context_length": self.rope_orig_ctx,
            }
        if self.long_factors:
            own |= {
                "rope.scaling.attn_factor": 1.19,
                "rope.scaling.original_context_length": self.rope_orig_ctx,
            }
        keys: dict[str, Value] = {
            "general.architecture": self.arch,
            # libllama wants certain tokens of a model whose name says that it is a Phi 3.
            "general.name": f"tiny-{self.arch.replace('phi3', 'phi')}-{self.seed}",
        }
        keys |= {f"{self.arch}.{name}": value for name, value in (own | self.own_keys()).items()}
        return keys | self._vocab_metadata() | dict(self.extra)

    def _vocab_metadata(self) -> dict[str, Value]:
        if self.vocab == "spm":
            return spm_metadata(self.n_vocab)
        if self.vocab == "bpe":
            return bpe_metadata(self.n_vocab)
        return {"tokenizer.ggml.model": "no_vocab"}

    def raw_tensors(self) -> list[RawTensor]:
        """The tensors as written: matrices in their type, all else F32."""
        matrices = self.matrices()
        return [
            tensor(name, array, self._type(name) if name in matrices else F32)
            for name, array in self.arrays.items()
        ]

    def _type(self, name: str) -> GGMLQuantizationType:
        short = name.removesuffix(".weight")
        return self.types.get(short, self.types.get(short.split(".")[-1], self.weight_type))

    def to_bytes(self) -> bytes:
        """The whole model as one GGUF file."""
        return gguf_bytes(self.metadata(), self.raw_tensors())

    def write(self, path: str | Path) -> Path:
        """Write one file and give its path."""
        Path(path).write_bytes(self.to_bytes())
        return Path(path)

    def write_split(self, folder: str | Path, n_files: int, stem: str = "tiny") -> list[Path]:
        """Write files stem-00001-of-0000N.gguf; the first one holds the metadata."""
        tensors = self.raw_tensors()
        paths = []
        for index in range(n_files):
            part = tensors[len(tensors) * index // n_files : len(tensors) * (index + 1) // n_files]
            keys: dict[str, Value] = {
                "split.no": np.uint16(index),
                "split.count": np.uint16(n_files),
                "split.tensors.count": np.int32(len(tensors)),
            }
            path = Path(folder) / f"{stem}-{index + 1:05d}-of-{n_files:05d}.gguf"
            paths.append(write_gguf(path, (self.metadata() | keys) if index == 0 else keys, part))
        return paths


@dataclass(frozen=True)
class TinyLlama(TinyModel):
    """A random model of `general.architecture = llama`."""

    arch = "llama"


@dataclass(frozen=True)
class TinyAdapter:
    """A random adapter; Q8_0 needs ranks and input widths that are multiples of 32."""

    rank: int | Mapping[str, int] = 4  # one for all, or by target (default then 4)
    alpha: float | None = 8.0  # None: the key is missing
    targets: Sequence[str] | None = None  # short names; None: all matrices of a layer
    layers: Sequence[int] | None = None  # None: all
    embeddings: bool = False  # token_embd.weight: a (n_vocab, rank), b (n_embd, rank)
    output: bool = False  # output.weight
    dtype: GGMLQuantizationType = F32
    invocation_tokens: Sequence[int] | None = None
    b_std: float = 0.1  # with rank 4 and alpha 8 the change is 0.4 of the base's output
    metadata: Mapping[str, Value] = field(default_factory=dict)  # further or overriding
    seed: int = 1

    def raw_tensors(self, model: TinyModel) -> list[RawTensor]:
        """Both halves of every pair, as written."""
        tensors = []
        for name, (a, b) in self._random_pairs(model).items():
            tensors += [
                tensor(f"{name}.lora_a", a, self.dtype),
                tensor(f"{name}.lora_b", b, self.dtype),
            ]
        return tensors

    def arrays(self, model: TinyModel) -> AdapterArrays:
        """What the file means: pairs as read back from `dtype`, and alpha (0 = none)."""
        pairs = {
            name: (self._rounded(a), self._rounded(b))
            for name, (a, b) in self._random_pairs(model).items()
        }
        return AdapterArrays(alpha=self.alpha or 0.0, pairs=pairs)

    def _rounded(self, values: Array) -> Array:
        return dequantised(quantised(values, self.dtype), values.shape, self.dtype)

    def _random_pairs(self, model: TinyModel) -> dict[str, tuple[Array, Array]]:
        shapes = model.matrices()
        pairs = {}
        for name in self._names(model):
            target = name.removesuffix(".weight").split(".")[-1]
            rank = self.rank if isinstance(self.rank, int) else self.rank.get(target, 4)
            *stack, n_out, n_in = shapes.get(name, shapes["token_embd.weight"])
            # The lookup's A is indexed by token, so its rows are the activations themselves.
            is_lookup = name == "token_embd.weight"
            a_shape, a_std = ((n_out, rank), 1.0) if is_lookup else ((rank, n_in), n_in**-0.5)
            b_shape = (n_in, rank) if is_lookup else (n_out, rank)
            b_std = self.b_std / (model.embedding_gain() if is_lookup else 1.0)
            a = np.float32(a_std) * _normal(self.seed, f"{name}.lora_a", (*stack, *a_shape))
            b = np.float32(b_std) * _normal(self.seed, f"{name}.lora_b", (*stack, *b_shape))
            pairs[name] = (a, b)
        return pairs

    def _names(self, model: TinyModel) -> list[str]:
        layers = range(model.n_layer) if self.layers is None else self.layers
        targets = model.targets if self.targets is None else self.targets
        names = [
            f"blk.{il}.{target}.weight"
            for il in layers
            for target in targets
            # Layers may be unlike; one that the model has not is meant to be wrong.
            if il >= model.n_layer or f"blk.{il}.{target}.weight" in model.matrices()
        ]
        return names + ["token_embd.weight"] * self.embeddings + ["output.weight"] * self.output

    def keys(self, arch: str = "llama") -> dict[str, Value]:
        """Keys of the file; `metadata` comes last and overrides."""
        keys: dict[str, Value] = {
            "general.type": "adapter",
            "general.architecture": arch,
            "adapter.type": "lora",
        }
        if self.alpha is not None:
            keys["adapter.lora.alpha"] = float(self.alpha)
        if self.invocation_tokens is not None:
            keys["adapter.alora.invocation_tokens"] = np.asarray(self.invocation_tokens, np.uint32)
        return keys | dict(self.metadata)

    def to_bytes(self, model: TinyModel) -> bytes:
        """The whole adapter as one GGUF file."""
        return gguf_bytes(self.keys(model.arch), self.raw_tensors(model))

    def write(self, path: str | Path, model: TinyModel) -> AdapterArrays:
        """Write the file and give what it means."""
        Path(path).write_bytes(self.to_bytes(model))
        return self.arrays(model)


def write_adapter_raw(
    path: str | Path, metadata: Metadata, tensors: Sequence[RawTensor] | Mapping[str, Array]
) -> Path:
    """Write an adapter file that may be wrong in any way; arrays are written as F32."""
    if isinstance(tensors, Mapping):
        tensors = [tensor(name, array) for name, array in tensors.items()]
    return write_gguf(path, metadata, tensors)


def random_normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Standard normal values that depend on seed and name alone."""
    return _normal(seed, name, shape)


def random_uniform(seed: int, name: str, low: float, high: float, n: int) -> Array:
    """(n,) values in [low, high) that depend on seed and name alone."""
    return _rng(seed, name).uniform(low, high, n).astype(np.float32)


def _rng(seed: int, name: str) -> np.random.Generator:
    # By name, so that an option never changes the other tensors.
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    return _rng(seed, name).standard_normal(shape, dtype=np.float32)
