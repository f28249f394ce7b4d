"""Which files of a folder somewhere else are an adapter of PEFT or MLX. URLs have no lists, so the
files are asked for by their names, one after the other; weights that were pickled are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loragraph.adapters.convert.source import CONFIG, INDEX, PICKLED, WEIGHTS, shard_names
from loragraph.errors import SourceError, UnsupportedError

Take = Callable[[str], bool]
"""Has a file of the folder fetched into ours; False where there is none of that name."""


def take_folder(folder: Path, take: Take, is_there: Take, source: str) -> set[str]:
    """Fetches an adapter's files into `folder`; their names.

    `is_there` asks without fetching, `source` is for messages. SourceError for a folder without
    configuration or weights, UnsupportedError for pickled weights, AdapterFormatError for an index
    that is none.
    """
    if not take(CONFIG):
        raise SourceError(
            f"expected a folder of PEFT or MLX, got none with a file {CONFIG} that can be read",
            source=source,
        )
    for name in WEIGHTS:
        if take(name):
            return {CONFIG, name}
    if take(INDEX):
        names = shard_names(folder)
        for name in names:
            if not take(name):
                raise SourceError(f"expected {name}, which {INDEX} names", source=source)
        return {CONFIG, INDEX, *names}
    for name in PICKLED:
        if is_there(name):
            raise UnsupportedError(
                f"{source}: holds pickled weights, {name}, which are not read on the way",
                what="pickled weights",
                hint="loragraph convert reads them where torch is installed",
            )
    raise SourceError(
        f"expected weights beside {CONFIG}: one of {', '.join((*WEIGHTS, INDEX))}", source=source
    )
