"""An adapter's tensors by module: which parts each has, whether none is missing or too many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loragraph.adapters.convert.config import AdapterConfig
from loragraph.adapters.convert.names import Named, Part, take_apart
from loragraph.adapters.convert.safetensors import StoredTensor
from loragraph.errors import AdapterFormatError, UnsupportedError

_HALVES = {
    Part.A: Part.B,
    Part.TABLE_A: Part.TABLE_B,
    Part.A_TRANSPOSED: Part.B_TRANSPOSED,
}
_HALVES |= {b: a for a, b in _HALVES.items()}


@dataclass(frozen=True)
class Module:
    """One module of the trained model, and what the adapter has for it."""

    name: str
    depth: int  # how often `.base_layer` stood in the name: parameters wrapped one in another
    parts: Mapping[Part, StoredTensor] = field(default_factory=dict)

    def part(self, part: Part) -> StoredTensor:
        """The tensor of a part that is known to be there."""
        return self.parts[part]

    @property
    def lowrank(self) -> bool:
        """Whether it has a low-rank pair."""
        return any(part in self.parts for part in _HALVES)


def modules_of(
    path: Path, tensors: Mapping[str, StoredTensor], config: AdapterConfig
) -> list[Module]:
    """Every module with its parts, in order of their names; raises for what is incomplete."""
    if not tensors:
        raise AdapterFormatError("it holds no tensor", path=path)
    parts: dict[tuple[str, int], dict[Part, StoredTensor]] = {}
    names = {name: take_apart(name) for name in tensors}
    _check_one_adapter(path, names.values())
    for name, info in tensors.items():
        named = names[name]
        if not info.nbytes:
            raise AdapterFormatError(
                "expected values, got an empty tensor: it was saved before its shards were "
                "gathered (DeepSpeed ZeRO-3, FSDP)",
                path=path,
                where=name[:200],
            )
        found = parts.setdefault(_unwrapped(named), {})
        if named.part in found:
            raise AdapterFormatError(
                f"'{found[named.part].name}' and '{name}' are the same part of one module",
                path=path,
            )
        found[named.part] = info
    modules = [Module(name, depth, found) for (name, depth), found in sorted(parts.items())]
    for module in modules:
        _check_complete(path, module, config)
    _check_promises(path, modules, config)
    return modules


def _check_one_adapter(path: Path, names: Iterable[Named]) -> None:
    adapters = sorted({named.adapter for named in names} - {""})
    if len(adapters) > 1:
        raise UnsupportedError(
            f"{path}: the names hold several adapters: {', '.join(adapters[:5])}",
            what="several adapters in one file",
            hint="save each with save_pretrained(selected_adapters=[…])",
        )


def _unwrapped(named: Named) -> tuple[str, int]:
    """The module's own path; PEFT nests the wrappers of several parameters of one module."""
    name, depth = named.module, 0
    while name.endswith(".base_layer"):
        name, depth = name.removesuffix(".base_layer"), depth + 1
    return name, depth


def _check_complete(path: Path, module: Module, config: AdapterConfig) -> None:
    for half, other in _HALVES.items():
        if half in module.parts and other not in module.parts:
            raise AdapterFormatError(
                f"{module.name}: {half.value} is there, {other.value} is missing",
                path=path,
                hint="the file is incomplete: save the adapter again",
            )
    if not module.lowrank and (extra := module.parts.keys() & {Part.B_BIAS, Part.MAGNITUDE}):
        raise AdapterFormatError(
            f"{module.name}: {min(part.value for part in extra)} is there, its pair is missing",
            path=path,
        )
    has_bias = Part.B_BIAS in module.parts
    if Part.A in module.parts and has_bias != config.lora_bias:
        expected = (
            "a bias of lora_B (lora_bias is true)" if config.lora_bias else "no bias of lora_B"
        )
        raise AdapterFormatError(
            f"{module.name}: expected {expected}",
            path=path,
            hint="weights and adapter_config.json are not of the same training",
        )
    has_magnitude = Part.MAGNITUDE in module.parts
    if module.lowrank and has_magnitude != config.dora:
        expected = "a magnitude vector (use_dora is true)" if config.dora else "no magnitude vector"
        raise AdapterFormatError(
            f"{module.name}: expected {expected}",
            path=path,
            hint="weights and adapter_config.json are not of the same training",
        )


def _check_promises(path: Path, modules: list[Module], config: AdapterConfig) -> None:
    """What the configuration says was trained must be in the file."""
    full = [module.name for module in modules if Part.FULL in module.parts]
    for name in config.modules_to_save:
        if not any(module.endswith(name) for module in full):  # PEFT's rule
            raise AdapterFormatError(
                f"modules_to_save names '{name}', whose weight is not in the file",
                path=path,
                hint="weights and adapter_config.json are not of the same training",
            )
    if config.token_indices and not any(Part.TOKENS in module.parts for module in modules):
        raise AdapterFormatError(
            "trainable_token_indices is set, but the file has no trainable_tokens_delta", path=path
        )
