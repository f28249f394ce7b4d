"""PEFT and MLX adapters -> GGUF, with the base GGUF alone: no other file, no network.

Whatever changes the strength or the forward pass is carried over exactly or refused with the
reason; nothing is dropped.
"""

from __future__ import annotations

import os
from pathlib import Path

from loragraph.adapters.convert.config import read_adapter_config
from loragraph.adapters.convert.facts import read_base
from loragraph.adapters.convert.plan import Plan, make_plan
from loragraph.adapters.convert.source import (
    locate,
    open_source,
    read_config,
    refuse_model_folder,
)
from loragraph.adapters.convert.write import OUT_TYPES, OutType, Progress, write_plan
from loragraph.errors import ConfigError
from loragraph.ggml.lib import Library, load_library

__all__ = ["Plan", "convert", "plan_conversion"]


def plan_conversion(
    path: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    lib: Library | None = None,
) -> Plan:
    """What converting would do, from headers and configuration alone.

    Raises AdapterFormatError (the files contradict themselves), AdapterMismatchError (made for
    another base) or UnsupportedError (with the reason and what to do).
    """
    location = locate(path)
    raw = read_config(location)
    refuse_model_folder(location)
    config = read_adapter_config(location.config_path, raw)
    facts = read_base(lib or load_library(None), Path(base))
    return make_plan(open_source(location, raw), facts, config)


def convert(
    path: str | os.PathLike[str],
    base: str | os.PathLike[str],
    outfile: str | os.PathLike[str] | None = None,
    *,
    outtype: OutType = "f32",
    name: str | None = None,
    dry_run: bool = False,
    lib: Library | None = None,
    progress: Progress | None = None,
) -> tuple[Path, Plan]:
    """Converts a PEFT or MLX adapter (a folder, or a file in one) to a GGUF adapter for `base`.

    `base` is the GGUF model that it will run on, of any quantisation. `outfile` (default: the
    folder's name and type, beside the folder) appears when it is complete. Returns its path and
    the plan that was carried out; `dry_run` writes nothing. Files that need none of loragraph's
    own keys (see docs/adapter-format.md) load in llama.cpp too, which `Plan.llama_cpp` says.
    `progress` gets (bytes written, bytes in all).
    Errors: as `plan_conversion`, and ConfigError for an output that cannot be written.
    """
    if outtype not in OUT_TYPES:
        raise ConfigError(f"expected {', '.join(OUT_TYPES)}, got {outtype!r}", field="outtype")
    plan = plan_conversion(path, base, lib=lib)
    source = plan.source.resolve()
    named = name or source.name
    # Beside the folder, also where it was named "." or "..".
    beside = plan.source.parent if plan.source.name not in ("", "..") else source.parent
    target = Path(outfile) if outfile is not None else beside / f"{source.name}-{outtype}.gguf"
    if not dry_run:
        write_plan(plan, target, outtype, named, progress)
    return target, plan
