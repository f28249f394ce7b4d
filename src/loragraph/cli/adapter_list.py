"""The values of --lora and --lora-scaled: lists of paths, some with a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from loragraph.errors import ConfigError


def adapter_list(plain: Iterable[str], scaled: Iterable[str]) -> list[tuple[str, float]]:
    """(path, user scale) of every adapter, in the order given, plain ones first."""
    paths = [(path, 1.0) for value in plain for path in csv_fields(value, "--lora")]
    fields = (field for value in scaled for field in csv_fields(value, "--lora-scaled"))
    return paths + [_path_and_scale(field) for field in fields]


def scaled_path(text: str) -> tuple[str, float]:
    """PATH or PATH:SCALE; a path that exists may hold colons, and then has scale 1."""
    path, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0  # a colon of the path; the file will be said to be missing
    if not path or not math.isfinite(scale):
        raise ConfigError(
            f"expected PATH:SCALE with a finite scale, got {text!r}", field="adapters"
        )
    return path, scale


def csv_fields(text: str, flag: str) -> list[str]:
    """Fields between commas; as in llama.cpp a field that begins with a double quote may hold
    commas until the closing quote and doubled quotes, and any other quote is a character.
    """
    fields = list(_fields(text, flag))
    if not all(fields):
        raise ConfigError(
            f"expected paths between the commas, got {text!r}",
            field=flag,
            hint="a path with a comma in it goes in double quotes",
        )
    return fields


def _fields(text: str, flag: str) -> Iterator[str]:
    field, quoted = "", False
    chars = iter([*text, ""])
    char = next(chars)
    while char:
        following = next(chars)
        if quoted and char == '"' == following:
            field += char
            following = next(chars)
        elif char == '"' and (quoted or not field):
            quoted = not quoted
        elif char == "," and not quoted:
            yield field
            field = ""
        else:
            field += char
        char = following
    if quoted:
        raise ConfigError(f"expected a closing double quote in {text!r}", field=flag)
    yield field


def _path_and_scale(field: str) -> tuple[str, float]:
    path, colon, number = field.rpartition(":")
    if not (colon and path):
        raise ConfigError(
            f"expected PATH:SCALE, got {field!r}",
            field="--lora-scaled",
            hint="for scale 1 use --lora",
        )
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise ConfigError(
            f"expected a finite number as scale, got {number!r} in {field!r}",
            field="--lora-scaled",
            hint="the scale is what follows the last colon",
        )
    return path, scale
