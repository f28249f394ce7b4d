"""An adapter file's header before it is trusted: what the checks look at. No tensor data yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loragraph.errors import GGUFError
from loragraph.ggml.gguf import GGUFFile, Scalar, TensorInfo
from loragraph.ggml.lib import Library

ALPHA_KEY = "adapter.lora.alpha"
INVOCATION_KEY = "adapter.alora.invocation_tokens"
TIED_OUTPUT_KEY = "loragraph.adapter.tied_output"
TASK_NAME_KEY = "adapter.lora.task_name"
PROMPT_PREFIX_KEY = "adapter.lora.prompt_prefix"

MAX_ARRAY = 1 << 16
"""Values of the longest array that an adapter's metadata keeps: a header cannot fill the memory."""

_SUFFIXES = {
    ".lora_a": "a",
    ".lora_b": "b",
    # loragraph's own (docs/adapter-format.md); llama.cpp refuses a file that has them.
    ".lora_magnitude": "magnitude",
    ".lora_bias": "bias",
    ".lora_delta": "delta",
}


@dataclass(slots=True)
class DraftPair:
    """The halves found for one target, either may be missing, and the vectors beside them.

    A bias, or the change of a norm, may stand without a pair.
    """

    target: str
    a: TensorInfo | None = None
    b: TensorInfo | None = None
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None
    delta: TensorInfo | None = None  # of a norm's weight

    @property
    def vectors(self) -> tuple[TensorInfo, ...]:
        """The magnitude, the bias and the norm's change, as far as there are any."""
        parts = (self.magnitude, self.bias, self.delta)
        return tuple(part for part in parts if part is not None)

    @property
    def is_alone(self) -> bool:
        """Whether it has vectors that need no pair, and nothing of a pair."""
        return self.a is None and self.b is None and self.magnitude is None


class Sorted(NamedTuple):
    """The tensors of a file by what they are."""

    pairs: dict[str, DraftPair]  # by target, sorted
    alone: dict[str, DraftPair]  # vectors without a pair
    strays: tuple[str, ...]
    duplicates: tuple[str, ...]
    norms: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """Header of an adapter file with the load options that the checks depend on."""

    path: Path  # what the caller named: errors name it
    file: Path  # where the tensors are; another one where a folder was named
    scalars: Mapping[str, Scalar]
    types: Mapping[str, str]  # key -> type name, arrays included
    invocation_tokens: tuple[int, ...]
    pairs: Mapping[str, DraftPair]  # by target, sorted
    alone: Mapping[str, DraftPair]  # biases and changes of norms without a pair
    strays: tuple[str, ...]  # tensors that are no half of a pair, in the file's order
    duplicates: tuple[str, ...]  # tensors whose half of the pair was taken already
    arrays: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)  # up to MAX_ARRAY
    ignore_norm: bool = False
    tied_output: bool | None = None
    norms: tuple[str, ...] = field(default=())  # `*_norm.weight` tensors

    @property
    def alpha(self) -> float:
        """`adapter.lora.alpha` rounded to f32, 0 where missing; finite once the checks passed."""
        value = self.scalars.get(ALPHA_KEY, 0.0)
        with np.errstate(over="ignore"):
            return 0.0 if isinstance(value, str) else float(np.float32(value))

    @property
    def task_name(self) -> str:
        """`adapter.lora.task_name`, "" where the file has none."""
        return str(self.scalars.get(TASK_NAME_KEY, ""))

    @property
    def prompt_prefix(self) -> str:
        """`adapter.lora.prompt_prefix`, "" where the file has none."""
        return str(self.scalars.get(PROMPT_PREFIX_KEY, ""))


def read_draft(
    lib: Library,
    path: str | os.PathLike[str],
    *,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    named: str | os.PathLike[str] | None = None,
) -> Draft:
    """Reads the header; GGUFError where the container itself is damaged.

    `named` is what errors call the file, where it was made of something else.
    """
    with _opened(lib, path) as file:
        found = sort_tensors(file.tensors)
        tokens: tuple[int, ...] = ()
        if file.type_of(INVOCATION_KEY) == "array of u32":
            tokens = tuple(int(token) for token in file.numbers(INVOCATION_KEY))
        return Draft(
            path=file.path if named is None else Path(named),
            file=file.path,
            scalars=file.scalars(),
            arrays=file.arrays(MAX_ARRAY),
            types={key: file.type_of(key) for key in file},
            invocation_tokens=tokens,
            ignore_norm=ignore_norm,
            tied_output=tied_output,
            **found._asdict(),
        )


def _opened(lib: Library, path: str | os.PathLike[str]) -> GGUFFile:
    try:
        return GGUFFile(lib, path)
    except GGUFError as error:
        if isinstance(error.__cause__, OSError):  # "failed to open" says it already
            raise
        reason = error.message.removeprefix(f"{error.path}: ")
        raise GGUFError(
            f"failed to load lora adapter from file: {reason}", path=error.path, hint=error.hint
        ) from error


def sort_tensors(tensors: Mapping[str, TensorInfo]) -> Sorted:
    """Tensors to pairs and vectors by target, in a sound file or not."""
    pairs: dict[str, DraftPair] = {}
    strays: list[str] = []
    duplicates: list[str] = []
    norms: list[str] = []
    for name, info in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
        if not suffix:
            (norms if name.endswith("_norm.weight") else strays).append(name)
            continue
        # Every occurrence goes, as in llama.cpp, so two names can mean one half.
        target = name.replace(suffix, "")
        pair = pairs.setdefault(target, DraftPair(target))
        half = _SUFFIXES[suffix]
        if getattr(pair, half) is not None:
            duplicates.append(name)
        else:
            setattr(pair, half, info)
    targets = sorted(pairs.items())
    return Sorted(
        {target: pair for target, pair in targets if not pair.is_alone},
        {target: pair for target, pair in targets if pair.is_alone},
        tuple(strays),
        tuple(duplicates),
        tuple(norms),
    )
