"""Tiny random models of the llama family and adapters for them, as GGUF, from a seed.

Equal arguments give equal bytes. Weights are scaled so that activations stay near 1 and logits
spread with a standard deviation of 1 to 3: errors and adapters are visible, nothing overflows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

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
ATTENTION_TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output")
FFN_TARGETS = ("ffn_gate", "ffn_up", "ffn_down")
LINEAR_TARGETS = ATTENTION_TARGETS + FFN_TARGETS

__all__ = [
    "ATTENTION_TARGETS",
    "CHAT_TEMPLATE",
    "FFN_TARGETS",
    "LINEAR_TARGETS",
    "TinyAdapter",
    "TinyLlama",
    "gguf_bytes",
    "tensor",
    "write_adapter_raw",
]


@dataclass(frozen=True)
class TinyLlama:
    """A random model of `general.architecture = llama`.

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
    ffn_bias: bool = False  # biases of gate, up and down
    rope_freqs: bool = False  # the tensor rope_freqs.weight (n_rot / 2) f32
    rope_scaling: Literal["linear", "yarn"] | None = None
    rope_factor: float = 4.0
    rope_orig_ctx: int = 128
    rope_base: float = 10000.0
    scales: bool = False  # the F32 [1] tensors <name>.scale behind the linear weights
    head_dim: int = 0  # 0 = n_embd / n_head
    rope_dim: int = 0  # 0 = head_dim, the only value that libllama accepts for this family
    n_ctx_train: int = 512
    rms_eps: float = 1e-5
    weight_type: GGMLQuantizationType = F32  # of all matrices
    types: Mapping[str, GGMLQuantizationType] = field(
        default_factory=dict
    )  # by name, e.g. "output"
    vocab: Literal["spm", "bpe", "none"] = "spm"
    extra: Mapping[str, Value] = field(default_factory=dict)  # further or overriding metadata
    seed: int = 0

    @property
    def n_rot(self) -> int:
        """Width of one attention head, all of it rotated."""
        return self.head_dim or self.n_embd // self.n_head

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shape (n_out, n_in) of every matrix by GGUF name, in file order."""
        n_q, n_kv = self.n_head * self.n_rot, self.n_head_kv * self.n_rot
        block = {
            "attn_q": (n_q, self.n_embd),
            "attn_k": (n_kv, self.n_embd),
            "attn_v": (n_kv, self.n_embd),
            "attn_output": (self.n_embd, n_q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }
        shapes = {"token_embd.weight": (self.n_vocab, self.n_embd)}
        if not self.tied:
            shapes["output.weight"] = (self.n_vocab, self.n_embd)
        for il in range(self.n_layer):
            shapes |= {f"blk.{il}.{name}.weight": shape for name, shape in block.items()}
        return shapes

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """Every tensor before quantisation, numpy order, by GGUF name."""
        out = {name: self._matrix(name, shape) for name, shape in self.matrices().items()}
        out["output_norm.weight"] = self._near_one("output_norm.weight", self.n_embd)
        if self.rope_freqs:
            rng = _rng(self.seed, "rope_freqs")
            out["rope_freqs.weight"] = rng.uniform(1, 4, self.n_rot // 2).astype(np.float32)
        for il in range(self.n_layer):
            for norm in ("attn_norm", "ffn_norm"):
                name = f"blk.{il}.{norm}.weight"
                out[name] = self._near_one(name, self.n_embd)
            for target in self._biased():
                name = f"blk.{il}.{target}.bias"
                n_out = out[f"blk.{il}.{target}.weight"].shape[0]
                out[name] = 0.3 * _normal(self.seed, name, (n_out,))
            for target in LINEAR_TARGETS if self.scales else ():
                name = f"blk.{il}.{target}.scale"
                out[name] = _rng(self.seed, name).uniform(0.5, 1.5, 1).astype(np.float32)
        return out

    def _biased(self) -> tuple[str, ...]:
        return ATTENTION_TARGETS * self.attn_bias + FFN_TARGETS * self.ffn_bias

    def _matrix(self, name: str, shape: tuple[int, int]) -> Array:
        # 2 / sqrt(n_embd) behind a normalised activation gives logits of standard deviation 2.
        is_head = name == "output.weight" or (self.tied and name == "token_embd.weight")
        is_lookup = name == "token_embd.weight" and not self.tied
        std = 1.0 if is_lookup else (2.0 if is_head else 1.0) / np.sqrt(shape[1])
        return np.float32(std) * _normal(self.seed, name, shape)

    def _near_one(self, name: str, n: int) -> Array:
        return 1 + np.float32(0.1) * _normal(self.seed, name, (n,))

    def metadata(self) -> dict[str, Value]:
        """Keys of the file; `extra` comes last and overrides."""
        keys: dict[str, Value] = {
            "general.architecture": "llama",
            "general.name": f"tiny-llama-{self.seed}",
            "llama.context_length": self.n_ctx_train,
            "llama.embedding_length": self.n_embd,
            "llama.block_count": self.n_layer,
            "llama.feed_forward_length": self.n_ff,
            "llama.attention.head_count": self.n_head,
            "llama.attention.head_count_kv": self.n_head_kv,
            "llama.attention.layer_norm_rms_epsilon": self.rms_eps,
            "llama.rope.dimension_count": self.rope_dim or self.n_rot,
            "llama.rope.freq_base": self.rope_base,
            "llama.vocab_size": self.n_vocab,
        }
        if self.head_dim:
            keys |= {
                "llama.attention.key_length": self.head_dim,
                "llama.attention.value_length": self.head_dim,
            }
        if self.rope_scaling:
            keys |= {
                "llama.rope.scaling.type": self.rope_scaling,
                "llama.rope.scaling.factor": self.rope_factor,
                "llama.rope.scaling.original_context_length": self.rope_orig_ctx,
            }
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
class TinyAdapter:
    """A random adapter; Q8_0 needs ranks and input widths that are multiples of 32."""

    rank: int | Mapping[str, int] = 4  # one for all, or by target (default then 4)
    alpha: float | None = 8.0  # None: the key is missing
    targets: Sequence[str] = LINEAR_TARGETS
    layers: Sequence[int] | None = None  # None: all
    embeddings: bool = False  # token_embd.weight: a (n_vocab, rank), b (n_embd, rank)
    output: bool = False  # output.weight
    dtype: GGMLQuantizationType = F32
    invocation_tokens: Sequence[int] | None = None
    b_std: float = 0.1  # with rank 4 and alpha 8 the change is 0.4 of the base's output
    metadata: Mapping[str, Value] = field(default_factory=dict)  # further or overriding
    seed: int = 1

    def raw_tensors(self, model: TinyLlama) -> list[RawTensor]:
        """Both halves of every pair, as written."""
        tensors = []
        for name, (a, b) in self._random_pairs(model).items():
            tensors += [
                tensor(f"{name}.lora_a", a, self.dtype),
                tensor(f"{name}.lora_b", b, self.dtype),
            ]
        return tensors

    def arrays(self, model: TinyLlama) -> AdapterArrays:
        """What the file means: pairs as read back from `dtype`, and alpha (0 = none)."""
        pairs = {
            name: (self._rounded(a), self._rounded(b))
            for name, (a, b) in self._random_pairs(model).items()
        }
        return AdapterArrays(alpha=self.alpha or 0.0, pairs=pairs)

    def _rounded(self, values: Array) -> Array:
        return dequantised(quantised(values, self.dtype), values.shape, self.dtype)

    def _random_pairs(self, model: TinyLlama) -> dict[str, tuple[Array, Array]]:
        shapes = model.matrices()
        pairs = {}
        for name in self._names(model):
            target = name.removesuffix(".weight").split(".")[-1]
            rank = self.rank if isinstance(self.rank, int) else self.rank.get(target, 4)
            n_out, n_in = shapes.get(name, shapes["token_embd.weight"])
            # The lookup's A is indexed by token, so its rows are the activations themselves.
            is_lookup = name == "token_embd.weight"
            a_shape, a_std = ((n_out, rank), 1.0) if is_lookup else ((rank, n_in), n_in**-0.5)
            b_shape = (n_in, rank) if is_lookup else (n_out, rank)
            a = np.float32(a_std) * _normal(self.seed, f"{name}.lora_a", a_shape)
            b = np.float32(self.b_std) * _normal(self.seed, f"{name}.lora_b", b_shape)
            pairs[name] = (a, b)
        return pairs

    def _names(self, model: TinyLlama) -> list[str]:
        layers = range(model.n_layer) if self.layers is None else self.layers
        names = [f"blk.{il}.{target}.weight" for il in layers for target in self.targets]
        return names + ["token_embd.weight"] * self.embeddings + ["output.weight"] * self.output

    def keys(self) -> dict[str, Value]:
        """Keys of the file; `metadata` comes last and overrides."""
        keys: dict[str, Value] = {
            "general.type": "adapter",
            "general.architecture": "llama",
            "adapter.type": "lora",
        }
        if self.alpha is not None:
            keys["adapter.lora.alpha"] = float(self.alpha)
        if self.invocation_tokens is not None:
            keys["adapter.alora.invocation_tokens"] = np.asarray(self.invocation_tokens, np.uint32)
        return keys | dict(self.metadata)

    def to_bytes(self, model: TinyLlama) -> bytes:
        """The whole adapter as one GGUF file."""
        return gguf_bytes(self.keys(), self.raw_tensors(model))

    def write(self, path: str | Path, model: TinyLlama) -> AdapterArrays:
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


def _rng(seed: int, name: str) -> np.random.Generator:
    # By name, so that an option never changes the other tensors.
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    return _rng(seed, name).standard_normal(shape, dtype=np.float32)
