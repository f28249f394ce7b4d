"""adapter_config.json of PEFT or MLX -> the few facts that decide an adapter's effect.

Whatever changes the forward pass is read or refused; fields that only matter in training are
listed in _TRAINING_ONLY; a field that is neither known nor empty is reported as a warning.
Fields and their meaning: LoraConfig of PEFT 0.21; mlx-lm's tuner.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loragraph.adapters.checks import MAX_RANK
from loragraph.errors import AdapterFormatError, UnsupportedError

_MAX_PATTERNS = 4096
_MAX_PATTERN = 1024  # characters
_MAX_TOKENS = 1 << 16

_TRAINING_ONLY = frozenset(
    {
        "task_type", "inference_mode", "revision", "base_model_name_or_path", "auto_mapping",
        "peft_version", "lora_dropout", "megatron_core", "megatron_config", "init_lora_weights",
        "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
        "runtime_config", "qalora_group_size", "target_modules", "exclude_modules",
        "layers_to_transform", "layers_pattern", "enable_lora", "merge_weights",
        "parent_library", "fan_in_fan_out", "ephemeral_gpu_offload",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora",
        "bias", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
        "layer_replication", "alora_invocation_tokens", "invocation_string", "ensure_weight_tying",
    }
)  # fmt: skip
_OTHER_FORWARD: Mapping[str, str] = {
    "use_qalora": "QA-LoRA averages groups of inputs before lora_A",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "arrow_config": "Arrow routes each token between several adapters by their singular vectors",
    "kasa_config": "KaSA has a trained diagonal between lora_A and lora_B, and edits the base",
    "monteclora_config": "MonteCLoRA samples its factors",
}
_EDITS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KNOWN_TYPES: Mapping[str, str] = {
    "ADALORA": "AdaLoRA has singular values (lora_E) between its factors",
    "LOHA": "LoHa multiplies two low-rank products element by element",
    "LOKR": "LoKr is a Kronecker product",
    "IA3": "IA3 scales activations and has no low-rank part",
    "VERA": "VeRA's factors are random projections shared by all layers, with trained scales",
}


@dataclass(frozen=True)
class AdapterConfig:
    """What of a configuration decides the adapter's effect."""

    source: Literal["peft", "mlx"]
    alpha: float  # numerator of the scale; MLX: the scale itself
    rank: int  # as configured; the tensors decide
    rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    dora: bool = False
    trains_biases: bool = False  # those of the base
    lora_bias: bool = False
    invocation_tokens: tuple[int, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trains_whole: bool = False  # LN tuning: all that is in the file
    token_indices: Mapping[str, tuple[int, ...]] | None = None  # module name -> token ids
    target_parameters: tuple[str, ...] = ()
    n_layer: int | None = None  # of the base after layer_replication
    ties_head: bool = False  # the token table's change is the tied head's too
    base_name: str = ""
    warnings: tuple[str, ...] = ()


def read_adapter_config(path: Path, config: Mapping[str, Any]) -> AdapterConfig:
    """Checks and reads a configuration; AdapterFormatError, or UnsupportedError with the reason."""
    fields = _Fields(path, config)
    if "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config):
        return _mlx(fields)
    if "peft_type" not in config and not {"r", "lora_alpha"} <= config.keys():
        raise AdapterFormatError(
            "expected a PEFT or MLX configuration: it has neither peft_type nor lora_parameters",
            path=path,
            hint="is it the folder that save_pretrained() wrote?",
        )
    kind = fields.text("peft_type", "LORA").upper()
    if kind == "LN_TUNING":
        return _ln_tuning(fields)
    if kind != "LORA":
        raise _unsupported(
            path,
            f"peft_type is {kind}, and only LORA and LN_TUNING can be converted: "
            + _KNOWN_TYPES.get(kind, "it is another kind of adapter"),
            f"peft_type {kind}",
            "merge it in PEFT (merge_and_unload), convert the model, then loragraph extract",
        )
    _refuse_variants(fields)
    return _peft(fields)


def _peft(fields: _Fields) -> AdapterConfig:
    tokens = fields.integers("alora_invocation_tokens")
    if not tokens and fields.config.get("invocation_string"):
        raise _unsupported(
            fields.path,
            "it names its invocation as invocation_string, which older trainers tokenised with one "
            "token too many",
            "invocation_string",
            'write the tokens of the invocation into "alora_invocation_tokens"',
        )
    biases = fields.text("bias", "none")
    if biases not in ("none", "all", "lora_only"):
        raise fields.wrong("bias", "none, all or lora_only")
    return AdapterConfig(
        source="peft",
        alpha=fields.number("lora_alpha"),
        rank=fields.integer("r", 1, MAX_RANK),
        rslora=fields.flag("use_rslora"),
        rank_pattern=fields.pattern("rank_pattern", integers=True),
        alpha_pattern=fields.pattern("alpha_pattern"),
        dora=fields.flag("use_dora"),
        trains_biases=biases != "none",
        lora_bias=fields.flag("lora_bias"),
        invocation_tokens=tokens,
        modules_to_save=fields.names("modules_to_save"),
        token_indices=_token_indices(fields),
        target_parameters=fields.names("target_parameters"),
        n_layer=_replicated_layers(fields),
        ties_head=fields.flag("ensure_weight_tying"),
        base_name=fields.text("base_model_name_or_path", ""),
        warnings=_peft_warnings(fields),
    )


def _ln_tuning(fields: _Fields) -> AdapterConfig:
    """Norms trained whole: there is nothing low-rank in it, and no scale."""
    return AdapterConfig(
        source="peft",
        alpha=1.0,
        rank=1,
        modules_to_save=fields.names("modules_to_save"),
        trains_whole=True,
        base_name=fields.text("base_model_name_or_path", ""),
        warnings=_peft_warnings(fields),
    )


def _mlx(fields: _Fields) -> AdapterConfig:
    kind = fields.text("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise _unsupported(
            fields.path,
            f"fine_tune_type is '{kind}', and only lora and dora can be converted",
            f"fine_tune_type {kind}",
            "for a full fine-tune convert the model itself, then loragraph extract",
        )
    inner = fields.config.get("lora_parameters")
    if not isinstance(inner, dict):
        raise fields.wrong("lora_parameters", "an object with rank and scale")
    part = _Fields(fields.path, inner)
    rank = part.integer("rank", 1, MAX_RANK)
    if inner.get("scale") is None and inner.get("alpha") is None:
        raise part.wrong("scale", "a number: without it the strength is unknown")
    # The scale applies as it is, not divided by the rank; alpha stands in files of old versions.
    has_scale = inner.get("scale") is not None
    scale = part.number("scale") if has_scale else part.number("alpha") / rank
    return AdapterConfig(
        source="mlx",
        alpha=scale,
        rank=rank,
        dora=kind == "dora",
        base_name=fields.text("model", ""),
    )


def _refuse_variants(fields: _Fields) -> None:
    for key, reason in _OTHER_FORWARD.items():
        if fields.config.get(key):
            raise _unsupported(
                fields.path,
                f"it was trained with {key}: {reason}, so lora_A and lora_B alone are not what "
                "was trained",
                key,
                "merge it in PEFT (merge_and_unload), convert the model, then loragraph extract",
            )
    init = fields.config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_EDITS_BASE):
        raise _unsupported(
            fields.path,
            f"init_lora_weights {init!r:.60} changed the weights of the base before training, so "
            "the adapter does not fit the base that is in the GGUF file",
            f"init_lora_weights {init!r:.60}",
            "save it again with save_pretrained(path_initial_model_for_weight_conversion=…), "
            "which makes it fit the original base",
        )


def _token_indices(fields: _Fields) -> Mapping[str, tuple[int, ...]] | None:
    """Token ids by module name; a bare list means the token table."""
    value = fields.config.get("trainable_token_indices")
    if not value:
        return None
    table = value if isinstance(value, dict) else {"embed_tokens": value}
    found = {}
    for name, tokens in table.items():
        one = _Fields(fields.path, {"trainable_token_indices": tokens})
        ids = one.integers("trainable_token_indices")
        if len(set(ids)) != len(ids):
            raise fields.wrong("trainable_token_indices", "each token once")
        found[str(name)] = ids
    return found


def _replicated_layers(fields: _Fields) -> int | None:
    """Layers of the base that layer_replication made, None without it."""
    value = fields.config.get("layer_replication")
    if not value:
        return None
    if not isinstance(value, list) or not all(
        isinstance(part, list) and len(part) == 2 and all(type(n) is int for n in part)
        for part in value
    ):
        raise fields.wrong("layer_replication", "a list of [start, end]")
    n_layer = sum(int(end) - int(start) for start, end in value)
    if not 1 <= n_layer <= 1 << 16 or any(start < 0 or end < start for start, end in value):
        raise fields.wrong("layer_replication", "ranges of layers")
    return n_layer


def _peft_warnings(fields: _Fields) -> tuple[str, ...]:
    config = fields.config
    unknown = sorted(
        key
        for key, value in config.items()
        if value and key not in _TRAINING_ONLY | _READ | _OTHER_FORWARD.keys()
    )
    found = []
    if unknown:
        shown = ", ".join(f"{key[:40]} = {config[key]!r:.60}" for key in unknown[:5])
        found.append(f"{len(unknown)} fields of {path_name(fields.path)} are unknown: {shown}")
    if config.get("fan_in_fan_out"):
        found.append(
            "fan_in_fan_out says how the base stored its weights; lora_A and lora_B are the same"
        )
    return tuple(found)


def path_name(path: Path) -> str:
    """The last part of a path, for messages."""
    return path.name


def _unsupported(path: Path, message: str, what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"{path}: {message}", what=what, hint=hint)


class _Fields:
    """Typed access to a JSON object; null means that a field is not there."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config

    def wrong(self, key: str, expected: str) -> AdapterFormatError:
        got = self.config.get(key)
        return AdapterFormatError(
            f"expected {expected}, got {got!r:.80}", path=self.path, where=key
        )

    def text(self, key: str, default: str) -> str:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
            raise self.wrong(key, "a printable string")
        return value

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value is True

    def number(self, key: str) -> float:
        value = self.config.get(key)
        return self._number(key, value)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.config.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.config.get(key) or []
        if not isinstance(value, list) or len(value) > _MAX_TOKENS:
            raise self.wrong(key, "a list of token ids")
        if not all(type(token) is int and 0 <= token < 2**31 for token in value):
            raise self.wrong(key, "a list of token ids")
        return tuple(value)

    def names(self, key: str) -> tuple[str, ...]:
        value: Any = self.config.get(key) or ()
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, Sequence) or not all(
            isinstance(name, str) and name and name.isprintable() for name in names
        ):
            raise self.wrong(key, "a list of names")
        return tuple(names)

    def pattern(self, key: str, *, integers: bool = False) -> Any:
        """A table of regular expressions to numbers, {} where there is none."""
        value = self.config.get(key) or {}
        if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
            raise self.wrong(key, "an object of names to numbers")
        for name, number in value.items():
            if len(name) > _MAX_PATTERN:
                raise self.wrong(key, f"names of at most {_MAX_PATTERN} characters")
            if integers and (type(number) is not int or not 1 <= number <= MAX_RANK):
                raise self.wrong(key, f"ranks from 1 to {MAX_RANK}")
            self._number(key, number)
        return dict(value)

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a finite number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or abs(number) > 3e38:
            raise self.wrong(key, "a finite number")
        return number


def looks_like_path(name: str) -> bool:
    """Whether a base's name is a local path, which says nothing."""
    return bool(re.match(r"^([/.~]|[A-Za-z]:\\)", name))
