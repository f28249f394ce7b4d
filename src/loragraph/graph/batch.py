"""The flat tokens of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.mix import Mix
from loragraph.graph.stretches import Stretches


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of any sequences, each with its place and its adapters; `mixes[i]` is named by mix.

    A row is a token of the step; a sequence's rows stand together, ascending by position. It sees
    the cells that `stretches` names for it: its own sequence up to itself, whatever cells those
    are.
    """

    tokens: NDArray[np.int32]  # (n_tokens,) i32
    positions: NDArray[np.int32]  # (n_tokens,) i32
    cells: NDArray[np.int64]  # (n_tokens,) i64, where K and V are written
    mix: NDArray[np.int32]  # (n_tokens,) i32, index into mixes
    mixes: tuple[Mix, ...]
    outputs: NDArray[np.int32]  # (n_outputs,) i32, indices of the tokens whose results count
    stretches: Stretches  # what each row sees
    n_states: int = 0  # outputs, the last ones, that give their state instead of logits

    @classmethod
    def of_one(
        cls, tokens: NDArray[np.int32], first: int, mix: Mix, outputs: NDArray[np.int32]
    ) -> Batch:
        """Tokens of one sequence that fills its cells in order from `first`, all with one mix."""
        places = np.arange(first, first + len(tokens))
        none = np.zeros(len(tokens), np.int32)
        seen = Stretches.of_one(first, len(tokens))
        return cls(tokens, places.astype(np.int32), places, none, (mix,), outputs, seen)

    @property
    def n_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.tokens)

    @property
    def n_outputs(self) -> int:
        """Rows that leave the last layer."""
        return len(self.outputs)

    @property
    def n_logits(self) -> int:
        """Rows of logits that the step gives: those of the first outputs."""
        return len(self.outputs) - self.n_states

    @property
    def adapted(self) -> bool:
        """Whether some token carries an adapter."""
        if len(self.mixes) == 1:
            return bool(self.mixes[0]) and self.n_tokens > 0
        return any(self.mixes[i] for i in set(self.mix.tolist()))
