"""What `loragraph serve` is to load, and where to listen. Imports nothing of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragraph.cli.adapter_list import adapter_list
from loragraph.engine.registry import name_problem
from loragraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter of the command line."""

    name: str
    path: str
    scale: float | None  # in the default mix; None: not part of it


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load and where to listen."""

    base: Path
    adapters: Sequence[ServedAdapter]
    pinned: Sequence[str]
    adapter_dir: Path | None
    n_ctx: int  # 0: as trained
    max_model_len: int | None
    threads: int | None
    repack: bool
    engine_options: Mapping[str, Any]
    host: str
    port: int
    tls: tuple[Path, Path] | None  # key, certificate
    drain_timeout_s: float
    access_log: Path | None = None  # -: standard output

    def limits(self, n_ctx_train: int) -> tuple[int, int]:
        """Cells, and the most tokens of one request, with a base that was trained on so many."""
        asked = (n_ctx_train, self.max_model_len or 0, self.n_ctx)
        return self.n_ctx or n_ctx_train, min(limit for limit in asked if limit > 0)


def served_adapters(
    plain: Sequence[str], scaled: Sequence[str], adapter_dir: Path | None
) -> list[ServedAdapter]:
    """The adapters of --lora and --lora-scaled; ConfigError for one name used twice."""
    found: list[ServedAdapter] = []
    for value in plain:
        name, equals, path = value.partition("=")
        if equals and name_problem(name) is None and not Path(value).exists():
            found.append(ServedAdapter(name, path, None))
        else:
            found.append(ServedAdapter(_name(value), value, 1.0))
    found += [
        ServedAdapter(_name(path), path, scale)
        for path, scale in adapter_list((), [_quoted(value) for value in scaled])
    ]
    seen: dict[str, str] = {}
    for one in found:
        if one.name in seen:
            raise ConfigError(
                f"two adapters are called {one.name!r}: {seen[one.name]} and {one.path}",
                field="--lora",
                hint="give one a name of its own: NAME=PATH",
            )
        seen[one.name] = one.path
    if adapter_dir is not None and not adapter_dir.is_dir():
        raise ConfigError(f"expected a folder, got {adapter_dir}", field="--lora-dir")
    return found


def _name(path: str) -> str:
    """What an adapter without a name of its own is called: its file's or folder's name."""
    own = Path(path)
    return own.resolve().name if own.is_dir() else own.stem


def _quoted(field: str) -> str:
    """A field of a list, ready to be split again."""
    return '"' + field.replace('"', '""') + '"'
