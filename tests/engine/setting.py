"""Files that the tests of contexts and of lifetimes share."""

from __future__ import annotations

from pathlib import Path

from loragraph.engine.model import Model
from tests.tiny import TinyAdapter, TinyLlama


class Setting:
    """Files of one model and two adapters."""

    def __init__(self, folder: Path) -> None:
        tiny = TinyLlama()
        self.base = tiny.write(folder / "m.gguf")
        self.paths = [folder / "1.gguf", folder / "2.gguf"]
        TinyAdapter(seed=1).write(self.paths[0], tiny)
        TinyAdapter(rank=7, seed=2).write(self.paths[1], tiny)

    def load(self) -> Model:
        """A new model."""
        return Model.load(self.base, n_threads=1)
