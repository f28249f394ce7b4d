"""What the engine's loop works with: the contracts of its parts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.graph.batch import Batch


class StepRunner(Protocol):
    """Computes steps: `Runner`, or a fake."""

    def run(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]:
        """Logits (n_logits, n_vocab) f32."""

    @property
    def states(self) -> NDArray[np.float32]:
        """Of the last step: (n_states, n_embd) f32, borrowed until the next."""

    def zero_cells(self, cells: NDArray[np.int64]) -> None:
        """Zeroes cells, (n,) i64."""


class TokenTexts(Protocol):
    """What the loop needs of a vocabulary."""

    @property
    def n_tokens(self) -> int:
        """Tokens."""

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Bytes of a token."""

    def is_eog(self, token: int) -> bool:
        """Whether it ends a generation."""
