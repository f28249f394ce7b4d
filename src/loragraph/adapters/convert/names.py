"""Names: a training framework's tensor -> module and part; a module -> tensors of a GGUF base.

Module names go through the gguf package's tensor map of the base's architecture. Where one side
has q, k, v (or gate, up) apart and the other fused, the module gets a place in the fused tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from loragraph.adapters.convert.facts import BaseFacts
from loragraph.errors import AdapterMismatchError, UnsupportedError

# What a family's converter does to rows is a fact of the family: only those looked at are listed.
ARCHITECTURES = frozenset(
    {
        "llama", "granite", "granitemoe", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma",
        "gemma2", "gemma3", "phi3", "chatglm", "glm4",
    }
)  # fmt: skip


class Part(Enum):
    """What a tensor of an adapter is to its module."""

    A = "lora_A"
    B = "lora_B"
    B_BIAS = "lora_B.bias"
    TABLE_A = "lora_embedding_A"
    TABLE_B = "lora_embedding_B"
    A_TRANSPOSED = "lora_a"  # MLX: (n_in, rank), or (n_expert, rank, n_in)
    B_TRANSPOSED = "lora_b"
    MAGNITUDE = "lora_magnitude_vector"
    FULL = "weight"
    FULL_BIAS = "bias"
    TOKENS = "trainable_tokens_delta"
    FROZEN = "base_layer.weight"


_NAME = r"(?:\.(?P<adapter>(?!weight$|bias$)[\w-]+))?"
_PARTS: tuple[tuple[Part, re.Pattern[str]], ...] = tuple(
    (part, re.compile(rf"^(?P<module>.*?){pattern}$"))
    for part, pattern in (
        (Part.A, rf"\.lora_A{_NAME}\.weight"),
        (Part.B, rf"\.lora_B{_NAME}\.weight"),
        (Part.B_BIAS, rf"\.lora_B{_NAME}\.bias"),
        (Part.TABLE_A, rf"\.lora_embedding_A{_NAME}"),
        (Part.TABLE_B, rf"\.lora_embedding_B{_NAME}"),
        (Part.MAGNITUDE, rf"\.lora_magnitude_vector{_NAME}(?:\.weight)?"),
        (Part.TOKENS, rf"(?:\.token_adapter)?\.trainable_tokens_delta{_NAME}"),
        (Part.FULL, rf"\.modules_to_save{_NAME}\.weight"),
        (Part.FULL_BIAS, rf"\.modules_to_save{_NAME}\.bias"),
        (Part.FULL, rf"\.ln_tuning_layers{_NAME}\.weight"),
        (Part.FULL_BIAS, rf"\.ln_tuning_layers{_NAME}\.bias"),
        (Part.FROZEN, r"\.(?:base_layer\.weight|original_module\.(?:weight|bias))"),
        (Part.FULL_BIAS, r"\.base_layer\.bias"),  # how PEFT saves a bias that it trained
        (Part.A_TRANSPOSED, r"\.lora_a"),
        (Part.B_TRANSPOSED, r"\.lora_b"),
        (Part.MAGNITUDE, r"\.m"),
        (Part.FULL, r"\.weight"),
        (Part.FULL_BIAS, r"\.bias"),
    )
)
_FOREIGN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"lora_(unet|te\d?|transformer)_|\.lora_(down|up)\.weight$", "a diffusion model"),
        (r"(^|\.)(unet|down_blocks|up_blocks|mid_block|(single_)?transformer_blocks"
         r"|double_blocks|single_blocks|diffusion_model|text_encoder(_2)?)\.", "a diffusion model"),
        (r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens"
         r"|multi_modal_projector|mm_projector|image_newline)(\.|$)", "the vision part of a model"),
        (r"(^|\.)(audio_tower|audio_encoder|speech_encoder)\.", "the audio part of a model"),
        (r"\.(hada_w\d|hada_t\d)", "LoHa factors"),
        (r"\.lokr_", "LoKr factors"),
        (r"\.ia3_l", "IA3 vectors"),
        (r"\.vera_lambda|\.vera_[AB]", "VeRA vectors"),
        (r"\.lora_E(\.|$)|\.ranknum(\.|$)", "AdaLoRA's singular values"),
        (r"\.lora_diag(\.|$)", "KaSA's diagonal"),
        (r"prompt_embeddings|prompt_encoder", "a prompt that was trained"),
    )
)  # fmt: skip
_ANY_FOREIGN = re.compile("|".join(pattern.pattern for pattern, _ in _FOREIGN))
_PREFIXES = ("base_model.model.", "base_model.")
_QKV = re.compile(r"\.(qkv_proj|W_pack)$")
_GATE_UP = re.compile(r"\.gate_up_proj$")
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.(?P<expert>\d+)\.(?P<tail>\w+)$")
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_Q_K_V = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of an adapter, its name taken apart."""

    module: str  # the model's own path, without PEFT's prefixes
    part: Part
    adapter: str  # PEFT's name in the key, "" in most files


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a GGUF tensor that rows of a module are for."""

    target: str  # "blk.3.attn_qkv.weight"
    part: str  # "blk.3.attn_q": decides the order of the rows
    source_row: int  # first row in the module
    target_row: int  # first row in the tensor
    n_rows: int
    expert: int | None = None


def take_apart(name: str) -> Named:
    """Module and part of a tensor's name; UnsupportedError for what belongs to another method."""
    for pattern, kind in _FOREIGN if _ANY_FOREIGN.search(name) else ():
        if pattern.search(name):
            raise UnsupportedError(
                f"tensor '{name[:200]}' belongs to {kind}, and only LoRA of a language model can "
                "be converted",
                what=kind,
            )
    path = name
    for prefix in _PREFIXES:
        path = path.removeprefix(prefix)
    for part, pattern in _PARTS:
        match = pattern.match(path)
        if match and match["module"]:
            groups = match.groupdict()
            return Named(match["module"], part, groups.get("adapter") or "")
    raise UnsupportedError(
        f"tensor '{name[:200]}' is no part of a LoRA adapter",
        what="an unknown kind of tensor",
        hint="it would be dropped silently otherwise: which method wrote it?",
    )


def layer_of(module: str) -> int | None:
    """The number of the layer that a module stands in."""
    match = _LAYER.search(f".{module}")
    return int(match[1]) if match else None


class Names:
    """Where a base keeps what modules of a training framework are called."""

    def __init__(self, facts: BaseFacts) -> None:
        import gguf  # here, because importing it is slow

        arch = facts.info.arch
        if arch not in ARCHITECTURES:
            raise UnsupportedError(
                f"adapters for architecture '{arch}' cannot be converted; supported: "
                f"{', '.join(sorted(ARCHITECTURES))}",
                what=f"architecture {arch}",
                hint="the order of its rows has to be looked up: adapters/convert/names.py",
            )
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map: Any = gguf.get_tensor_name_map(numbers[arch], facts.n_layer)
        # What a family keeps fused has no name of its own there; llama's map has all parts.
        self._parts: Any = gguf.get_tensor_name_map(numbers["llama"], facts.n_layer)
        self._facts = facts
        self._targets = facts.info.targets

    def places(self, module: str, n_rows: int) -> list[Place]:
        """Where the `n_rows` rows of a module's weight stand; AdapterMismatchError for nowhere."""
        self._check_layer(module)
        expert, plain = _without_expert(module)
        # First, since some families' map gives gate_up_proj the name of up.
        if split := self._split(plain, n_rows, expert):
            return split
        name = self.lookup(plain)
        if name is not None and f"{name}.weight" in self._targets:
            return [self._direct(name, n_rows, expert)]
        if fused := self._fused(name or self._part(plain), n_rows, expert):
            return fused
        raise self._nowhere(module, name)

    def lookup(self, module: str) -> str | None:
        """The map's answer for the module, whatever wraps the language model."""
        return _find(self._map, module)

    def _part(self, module: str) -> str | None:
        return _find(self._parts, module)

    def _direct(self, name: str, n_rows: int, expert: int | None) -> Place:
        """The tensor itself; a fused gate and up under the name of up holds up's rows last."""
        n_out = self._targets[f"{name}.weight"].ne[1]
        gate = f"{name.removesuffix('ffn_up')}ffn_gate.weight"
        fused = name.endswith(".ffn_up") and gate not in self._targets
        start = n_rows if fused and n_out == 2 * n_rows else 0
        return Place(f"{name}.weight", name, 0, start, n_rows, expert)

    def _split(self, module: str, n_rows: int, expert: int | None) -> list[Place]:
        """A fused module for a base that keeps the parts apart."""
        for pattern, parts in ((_QKV, _Q_K_V), (_GATE_UP, ("ffn_gate", "ffn_up"))):
            layer = layer_of(module)
            if not pattern.search(module) or layer is None:
                continue
            if ".experts" in module:
                parts = ("ffn_gate_exps", "ffn_up_exps")
            names = [f"blk.{layer}.{part}" for part in parts]
            if all(f"{name}.weight" in self._targets for name in names):
                return self._cut(names, n_rows, expert, module)
        return []

    def _cut(self, names: list[str], n_rows: int, expert: int | None, module: str) -> list[Place]:
        sizes = [self._targets[f"{name}.weight"].ne[1] for name in names]
        if sum(sizes) != n_rows:
            raise AdapterMismatchError(
                f"{module}: expected {sum(sizes)} rows ({' + '.join(map(str, sizes))}), got "
                f"{n_rows}",
                hint="was it made for another base model?",
            )
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Place(f"{name}.weight", name, start, 0, size, expert)
            for name, start, size in zip(names, starts, sizes, strict=True)
        ]

    def _fused(self, name: str | None, n_rows: int, expert: int | None) -> list[Place]:
        """A part for a base that keeps it in a fused tensor: q, k, v; gate, up."""
        if name is None:
            return []
        block, _, tail = name.rpartition(".")
        layer = layer_of(name.replace("blk.", "layers.")) or 0
        if tail in _Q_K_V and f"{block}.attn_qkv.weight" in self._targets:
            start = self._qkv_start(f"{block}.attn_qkv.weight", tail, layer)
            return [Place(f"{block}.attn_qkv.weight", name, 0, start, n_rows)]
        fused = {"ffn_gate": "ffn_up", "ffn_gate_exps": "ffn_gate_up_exps",
                 "ffn_up_exps": "ffn_gate_up_exps"}.get(tail)  # fmt: skip
        target = f"{block}.{fused}.weight"
        if fused is None or target not in self._targets:
            return []
        if self._targets[target].ne[1] != 2 * n_rows:
            return []
        return [Place(target, name, 0, n_rows if tail == "ffn_up_exps" else 0, n_rows, expert)]

    def _qkv_start(self, target: str, tail: str, layer: int) -> int:
        """First row of q, k or v in a fused tensor, which holds them in this order."""
        heads, kv = self._facts.n_head[layer], self._facts.n_head_kv[layer]
        width = self._targets[target].ne[1] // (heads + 2 * kv)
        return {"attn_q": 0, "attn_k": heads * width, "attn_v": (heads + kv) * width}[tail]

    def _check_layer(self, module: str) -> None:
        layer = layer_of(module)
        if layer is not None and layer >= self._facts.n_layer:
            raise AdapterMismatchError(
                f"{module}: the base has {self._facts.n_layer} layers, the adapter changes layer "
                f"{layer}",
                hint="was it made for another base model?",
            )

    def _nowhere(self, module: str, name: str | None) -> AdapterMismatchError:
        info = self._facts.info
        missing = f"lacks the tensor '{name}.weight'" if name else "has no tensor for it"
        return AdapterMismatchError(
            f"{module}: the base ({info.arch} '{info.name}') {missing}",
            hint="was it made for another base model?",
        )


def _find(names: Any, module: str) -> str | None:
    for path in _spellings(module):
        found = names.get_name(path, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return str(found)
    return None


def _without_expert(module: str) -> tuple[int | None, str]:
    match = _EXPERT.match(module)
    if match is None:
        return None, module.replace(".switch_mlp.", ".experts.")
    return int(match["expert"]), f"{match['head']}.{match['tail']}"


def _spellings(module: str) -> Iterator[str]:
    """The path as it is, and without what multimodal models wrap a language model in."""
    yield module
    for wrapped, plain in (
        ("model.language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.", ""),
        ("model.model.", "model."),
        ("transformer.", ""),
    ):
        if module.startswith(wrapped):
            yield plain + module.removeprefix(wrapped)
    yield f"model.{module}"
    yield f"transformer.{module}"
