"""What was trained whole: weights and tokens as exact low-rank pairs, norms and biases as vectors.

A delta D = W' - W is the product of itself and an identity, so it is a pair of full rank, which
every lowering and llama.cpp compute as any other: A = I, B = D, or A = D, B = I, whichever is
smaller. Tokens t_1 … t_k of a table whose rows were trained are a pair of rank k: lora_a names the
tokens, lora_b holds the differences. Differences are to the base of the GGUF file as it is, so the
sum is what was trained, whatever the base's quantisation rounded. A norm's weight and a bias are
vectors of differences; gemma's files hold 1 + w where its checkpoints hold w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import TOKEN_EMBD, TargetKind
from loragraph.adapters.checks import MAX_RANK
from loragraph.adapters.convert.config import AdapterConfig
from loragraph.adapters.convert.facts import BaseFacts
from loragraph.adapters.convert.modules import Module
from loragraph.adapters.convert.names import Names, Part, Place
from loragraph.adapters.convert.permute import reordered, row_heads
from loragraph.adapters.convert.pieces import Piece, Read, VectorPiece
from loragraph.errors import AdapterFormatError, AdapterMismatchError, UnsupportedError

Values = NDArray[np.float32]

_WITHOUT_ONE = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose checkpoints hold the weights of norms without the 1 that GGUF files add."""


class TrainedMaker:
    """Makes the pieces of weights that were trained whole."""

    def __init__(self, facts: BaseFacts, names: Names, config: AdapterConfig, read: Read) -> None:
        self._facts = facts
        self._names = names
        self._config = config
        self._read = read
        self.skipped: list[str] = []  # tensors that were saved but not trained

    def is_trained(self, module: Module) -> bool:
        """Whether the module's whole weight was trained, by PEFT's rule."""
        if self._config.trains_whole:
            return True
        return any(module.name.endswith(name) for name in self._config.modules_to_save)

    def is_norm(self, module: Module) -> bool:
        """Whether the module is a norm of the base that was saved whole."""
        target = self._norm(module)
        found = self._facts.info.targets.get(target)
        return Part.FULL in module.parts and found is not None and target.endswith("_norm.weight")

    def norm(self, module: Module) -> list[VectorPiece]:
        """The change of a norm's weight; [] for one that was saved without being trained."""
        info, target = module.part(Part.FULL), self._norm(module)
        n = self._facts.info.targets[target].ne[0]
        if info.shape != (n,):
            raise AdapterMismatchError(
                f"{module.name}: the adapter's weight has the shape {list(info.shape)}, the base's "
                f"{target} {[n]}",
                hint="was it made for another base model?",
            )
        if Part.FULL_BIAS in module.parts:
            raise UnsupportedError(
                f"{module.name}: a bias of the norm was trained, and the base's norms have none",
                what="a bias of a norm",
            )
        if not self.is_trained(module):
            self.skipped.append(info.name)
            return []
        one = np.float32(self._facts.info.arch in _WITHOUT_ONE)

        def values() -> Values:
            # Rounded once: what is trained may be close to the base.
            base = self._facts.rows(target).reshape(-1).astype(np.float64)
            return (self._read(info.name).astype(np.float64) + one - base).astype(np.float32)

        return [VectorPiece(module.name, Place(target, target, 0, 0, n), 1.0, values)]

    def _norm(self, module: Module) -> str:
        return f"{self._names.lookup(module.name)}.weight"

    def weight(self, module: Module) -> list[Piece]:
        """The delta of a whole weight; [] for one that was saved without being trained."""
        info = module.part(Part.FULL)
        target = self._target(module)
        wanted = self._facts.info.targets[target]
        n_out, n_in = info.shape if len(info.shape) == 2 else (0, 0)
        n_out -= self._facts.padding(target, n_out)
        if (n_in, n_out) != wanted.ne[:2]:
            raise AdapterMismatchError(
                f"{module.name}: the adapter's weight has the shape {list(info.shape)}, the base's "
                f"{target} {[wanted.ne[1], wanted.ne[0]]}",
                hint="was it made for another base model, or one with added tokens?",
            )
        if not self.is_trained(module):
            # PEFT saves tables and heads beside a pair of theirs, as they were.
            self.skipped.append(info.name)
            return []
        rank = min(n_in, n_out)
        if rank > MAX_RANK:
            raise UnsupportedError(
                f"{module.name} was trained whole; its change has the rank {rank}, and ranks above "
                f"{MAX_RANK} are not supported",
                what=f"a full-rank change of {target}",
                hint="merge it in PEFT (merge_and_unload) and convert the whole model",
            )
        part = target.removesuffix(".weight")

        def delta() -> Values:
            values = reordered(self._read(info.name)[:n_out], row_heads(self._facts, part))
            return values - self._facts.rows(target)

        return [
            Piece(module.name, self._place(target), rank, 1.0, _factors(delta, target), "weights")
        ]

    def tokens(self, module: Module) -> list[Piece]:
        """Rows of a table, or of the head, that were trained alone."""
        info = module.part(Part.TOKENS)
        target = self._target(module)
        n_embd, n_vocab = self._facts.info.targets[target].ne[:2]
        ids = self._token_ids(module)
        if info.shape != (len(ids), n_embd):
            raise AdapterMismatchError(
                f"{module.name}: expected {len(ids)} tokens of {n_embd} values, got the shape "
                f"{list(info.shape)}"
            )
        if max(ids) >= n_vocab or len(ids) > MAX_RANK:
            raise AdapterMismatchError(
                f"{module.name}: expected at most {MAX_RANK} tokens below {n_vocab}, got "
                f"{len(ids)} up to {max(ids)}",
                hint="was it made for a base with added tokens?",
            )

        def factors() -> tuple[Values, Values]:
            delta = self._read(info.name) - self._facts.rows(target, ids)
            chosen = np.zeros((n_vocab, len(ids)), np.float32)
            chosen[list(ids), np.arange(len(ids))] = 1
            return (chosen, delta.T) if target == TOKEN_EMBD else (delta, chosen)

        return [Piece(module.name, self._place(target), len(ids), 1.0, factors, "tokens")]

    def bias(self, module: Module, pairs: Sequence[Piece]) -> list[VectorPiece]:
        """The change of a bias of the base, which goes with the pair of the same module.

        [] for one that was saved without being trained.
        """
        info = module.part(Part.FULL_BIAS)
        if not self._config.trains_biases and not self.is_trained(module):
            self.skipped.append(info.name)
            return []
        n_values = info.shape[0] if len(info.shape) == 1 else 0
        places = [piece.place for piece in pairs] or self._names.places(module.name, n_values)
        kinds = {self._facts.info.targets[place.target].kind for place in places}
        if kinds != {TargetKind.LINEAR}:
            raise UnsupportedError(
                f"{module.name}: its bias was trained, and it is {places[0].target} of the base: "
                "biases are carried for linear weights alone",
                what=f"a bias of {module.name}",
                hint="merge it in PEFT (merge_and_unload) and convert the whole model",
            )
        n_rows = sum(place.n_rows for place in places)
        if info.shape != (n_rows,) or not all(self._fits(place) for place in places):
            raise AdapterMismatchError(
                f"{module.name}: the adapter's bias has the shape {list(info.shape)}, and the base "
                f"has {self._facts.info.targets[places[0].target].ne[1]} rows in "
                f"{places[0].target}",
                hint="was it made for another base model?",
            )

        def values(place: Place) -> Callable[[], Values]:
            def read() -> Values:
                first = place.source_row
                trained = self._read(info.name)[first : first + place.n_rows]
                base = self._base_bias(place)
                if base is None:
                    return trained
                return trained - _restored(base, row_heads(self._facts, place.part))

            return read

        return [VectorPiece(module.name, place, 1.0, values(place)) for place in places]

    def _fits(self, place: Place) -> bool:
        """Whether the target has these rows, and no others where it is the module's own."""
        n_out = self._facts.info.targets[place.target].ne[1]
        whole = place.target == f"{place.part}.weight" and place.target_row == 0
        end = place.target_row + place.n_rows
        return end == n_out if whole else end <= n_out

    def _base_bias(self, place: Place) -> Values | None:
        """The base's own bias of these rows, None where it has none; a fused weight's parts may
        have biases of their own."""
        name = f"{place.target.removesuffix('.weight')}.bias"
        if name in self._facts.tensors:
            rows = slice(place.target_row, place.target_row + place.n_rows)
            return self._facts.rows(name).reshape(-1)[rows]
        if f"{place.part}.bias" in self._facts.tensors:
            return self._facts.rows(f"{place.part}.bias").reshape(-1)[: place.n_rows]
        return None

    def _target(self, module: Module) -> str:
        name = self._names.lookup(module.name)
        target = f"{name}.weight"
        found = self._facts.info.targets.get(target)
        if found is None or found.kind is TargetKind.NONE:
            raise UnsupportedError(
                f"{module.name} was trained whole, and the base's graph has no such weight",
                what=f"modules_to_save {module.name}",
                hint="a classification head is no part of a language model",
            )
        if found.kind not in (TargetKind.LINEAR, TargetKind.EMBEDDING):
            raise UnsupportedError(
                f"{module.name} was trained whole: it is {target}, which a low-rank part cannot "
                "change",
                what=f"modules_to_save {module.name}",
                hint="merge it in PEFT (merge_and_unload) and convert the whole model",
            )
        return target

    def _place(self, target: str) -> Place:
        ne = self._facts.info.targets[target].ne
        n_rows = ne[0] if target == TOKEN_EMBD else ne[1]
        # The rows are in the file's order already, so no part asks for another one.
        return Place(target, target, 0, 0, n_rows)

    def _token_ids(self, module: Module) -> tuple[int, ...]:
        table = self._config.token_indices or {}
        for name, ids in table.items():
            if module.name == name or module.name.endswith(f".{name}"):
                return ids
        if len(table) == 1:
            return next(iter(table.values()))
        raise AdapterFormatError(f"{module.name}: trainable_token_indices does not name it")


def _factors(delta: Callable[[], Values], target: str) -> Callable[[], tuple[Values, Values]]:
    """A difference of two weights as a pair, the identity on the smaller side."""

    def read() -> tuple[Values, Values]:
        values = delta()
        n_out, n_in = values.shape
        if target == TOKEN_EMBD:  # lookup: a row of A a token, B gives an embedding
            if n_in <= n_out:
                return values, np.eye(n_in, dtype=np.float32)
            return np.eye(n_out, dtype=np.float32), np.ascontiguousarray(values.T)
        if n_in <= n_out:
            return np.eye(n_in, dtype=np.float32), values
        return values, np.eye(n_out, dtype=np.float32)

    return read


def _restored(values: Values, n_head: int) -> Values:
    """Rows from GGUF's order back to transformers': the inverse of `reordered`."""
    if n_head == 0:
        return values
    pairs = values.reshape(n_head, values.shape[0] // n_head // 2, 2)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
