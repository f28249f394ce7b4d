"""A module's low-rank pair -> pieces of GGUF targets, shapes checked, values read on demand.

A piece is A (rank, n_in) and rows of B (n_rows, rank) for a place in one target. A fused module
gives several pieces; a fused tensor, or a stack of experts, takes several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, TargetKind
from loragraph.adapters.convert.config import AdapterConfig
from loragraph.adapters.convert.facts import BaseFacts
from loragraph.adapters.convert.modules import Module
from loragraph.adapters.convert.names import Names, Part, Place
from loragraph.adapters.convert.scale import module_scale
from loragraph.errors import AdapterFormatError, AdapterMismatchError, UnsupportedError

Values = NDArray[np.float32]
Read = Callable[[str], Values]
Method = Literal["lora", "weights", "tokens"]


@dataclass(frozen=True)
class Piece:
    """What one module gives one target; `factors` reads A (rank, n_in) and B (n_rows, rank)."""

    module: str
    place: Place
    rank: int
    scale: float  # effective, at user scale 1
    factors: Callable[[], tuple[Values, Values]]
    method: Method = "lora"


@dataclass(frozen=True)
class VectorPiece:
    """Values (n_rows,) for rows of one target: a magnitude, or a bias to add."""

    module: str
    place: Place
    scale: float  # of a bias; 1 for a magnitude
    values: Callable[[], Values]


class PieceMaker:
    """Makes the pieces of low-rank modules for one base."""

    def __init__(self, facts: BaseFacts, names: Names, config: AdapterConfig, read: Read) -> None:
        self._facts = facts
        self._names = names
        self._config = config
        self._read = read
        self.warnings: list[str] = []

    def lowrank(self, module: Module) -> list[Piece]:
        """The pieces of a module with a low-rank pair of any form."""
        if Part.TABLE_A in module.parts:
            return [self._table(module)]
        if Part.A_TRANSPOSED in module.parts:
            return self._mlx(module)
        if module.name.endswith(".experts"):
            return self._packed(module)
        return self._linear(module)

    def vectors(self, module: Module, part: Part) -> list[VectorPiece]:
        """The pieces of a magnitude or a bias of lora_B, where the module has one."""
        info = module.parts.get(part)
        if info is None:
            return []
        if sorted(info.shape)[:-1] != [1] * (len(info.shape) - 1):  # (n, 1) and (n,) are one
            raise _wrong_shape(info.name, "one dimension", info.shape)
        n_rows = max(info.shape, default=0)
        pieces = self.lowrank(module)
        scale = pieces[0].scale if part is Part.B_BIAS else 1.0
        if pieces[0].place.target == TOKEN_EMBD:
            if part is Part.B_BIAS or self._config.source == "mlx":
                raise UnsupportedError(
                    f"{module.name}: {part.value} of a token table is not supported",
                    what=f"{part.value} of a token table",
                )
            wanted = self._facts.info.targets[TOKEN_EMBD].ne[0]
        else:
            wanted = sum(piece.place.n_rows for piece in pieces)
        if n_rows != wanted or pieces[0].place.expert is not None:
            raise _wrong_shape(info.name, f"{wanted} values", info.shape)

        def values(place: Place) -> Callable[[], Values]:
            first = place.source_row
            return lambda: self._read(info.name).reshape(-1)[first : first + place.n_rows]

        return [VectorPiece(module.name, p.place, scale, values(p.place)) for p in pieces]

    def _linear(self, module: Module) -> list[Piece]:
        a, b = module.part(Part.A), module.part(Part.B)
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise _wrong_shape(a.name, "two dimensions", a.shape)
        rank, n_in = a.shape
        n_out = b.shape[0]
        self._check_rank(module, rank, b.shape[1])
        if self._names.lookup(module.name) == "output":
            n_out -= self._facts.padding(OUTPUT, n_out)
        places = self._names.places(module.name, n_out)
        self._check_sizes(module, places, n_in, n_out)
        scale = module_scale(self._config, module.name, rank)

        def factors(place: Place) -> Callable[[], tuple[Values, Values]]:
            rows = slice(place.source_row, place.source_row + place.n_rows)
            return lambda: (self._read(a.name), self._read(b.name)[rows])

        return [Piece(module.name, place, rank, scale, factors(place)) for place in places]

    def _table(self, module: Module) -> Piece:
        """PEFT's lookup: lora_embedding_A (rank, n_vocab), lora_embedding_B (n_embd, rank)."""
        a, b = module.part(Part.TABLE_A), module.part(Part.TABLE_B)
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise _wrong_shape(a.name, "two dimensions", a.shape)
        rank, n_vocab = a.shape
        self._check_rank(module, rank, b.shape[1])
        place = self._table_place(module, n_vocab, b.shape[0])
        scale = module_scale(self._config, module.name, rank)
        n_rows = self._facts.info.targets[TOKEN_EMBD].ne[1]
        return Piece(
            module.name,
            place,
            rank,
            scale,
            lambda: (self._read(a.name).T[:n_rows], self._read(b.name)),
        )

    def _table_place(self, module: Module, n_vocab: int, n_embd: int) -> Place:
        name = self._names.lookup(module.name)
        if name is None or f"{name}.weight" != TOKEN_EMBD:
            raise AdapterMismatchError(f"{module.name}: the base has no such table")
        target = self._facts.info.targets[TOKEN_EMBD]
        n_vocab -= self._facts.padding(TOKEN_EMBD, n_vocab)
        if (n_embd, n_vocab) != target.ne[:2]:
            raise AdapterMismatchError(
                f"{module.name}: the adapter's table has {n_vocab} tokens of {n_embd} values, the "
                f"base's {target.ne[1]} of {target.ne[0]}",
                hint="was it made for another base model, or one with added tokens?",
            )
        return Place(TOKEN_EMBD, "token_embd", 0, 0, n_embd)

    def _mlx(self, module: Module) -> list[Piece]:
        """MLX: lora_a (n_in, rank), lora_b (rank, n_out), of the lookup with n_vocab and n_embd.

        Experts: lora_a (n_expert, rank, n_in), lora_b (n_expert, n_out, rank).
        """
        a, b = module.part(Part.A_TRANSPOSED), module.part(Part.B_TRANSPOSED)
        if len(a.shape) == 3 and len(b.shape) == 3:
            n_expert, rank, n_in = a.shape
            if b.shape[0] != n_expert:
                raise _wrong_shape(b.name, f"{n_expert} experts", b.shape)
            self._check_rank(module, rank, b.shape[2])
            return self._experts(
                module, n_expert, rank, n_in, b.shape[1],
                lambda e: (self._read(a.name)[e], self._read(b.name)[e]),
            )  # fmt: skip
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise _wrong_shape(a.name, "two or three dimensions", a.shape)
        n_in, rank = a.shape
        self._check_rank(module, rank, b.shape[0])
        n_out = b.shape[1]
        if self._names.lookup(module.name) == "token_embd":
            place = self._table_place(module, n_in, n_out)
            n_rows = self._facts.info.targets[TOKEN_EMBD].ne[1]
            return [
                Piece(
                    module.name, place, rank, module_scale(self._config, module.name, rank),
                    lambda: (self._read(a.name)[:n_rows], self._read(b.name).T),
                )
            ]  # fmt: skip
        places = self._names.places(module.name, n_out)
        self._check_sizes(module, places, n_in, n_out)
        scale = module_scale(self._config, module.name, rank)

        def factors(place: Place) -> Callable[[], tuple[Values, Values]]:
            rows = slice(place.source_row, place.source_row + place.n_rows)
            return lambda: (self._read(a.name).T, self._read(b.name).T[rows])

        return [Piece(module.name, place, rank, scale, factors(place)) for place in places]

    def _packed(self, module: Module) -> list[Piece]:
        """PEFT's target_parameters on 3-D experts: A (E * rank, n_in) with the expert as the outer
        index, B (n_out, rank * E) with the expert as the inner one."""
        a, b = module.part(Part.A), module.part(Part.B)
        n_expert = self._n_expert(module)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] % n_expert:
            raise _wrong_shape(a.name, f"(rank * {n_expert}, n_in)", a.shape)
        rank = a.shape[0] // n_expert
        self._check_rank(module, a.shape[0], b.shape[1])
        parameter, swapped = self._parameter(module, a.shape[1], b.shape[0])
        path = f"{module.name}.{parameter}"
        inner = Module(path, 0, module.parts)

        def factors(e: int) -> tuple[Values, Values]:
            first = self._read(a.name).reshape(n_expert, rank, -1)[e]  # (rank, n_in)
            second = self._read(b.name).reshape(b.shape[0], rank, n_expert)[:, :, e]
            # Before PEFT looked at the parameter's orientation, A's columns were its rows.
            return (second.T, first.T) if swapped else (first, second)

        n_in, n_out = (b.shape[0], a.shape[1]) if swapped else (a.shape[1], b.shape[0])
        return self._experts(inner, n_expert, rank, n_in, n_out, factors)

    def _experts(
        self,
        module: Module,
        n_expert: int,
        rank: int,
        n_in: int,
        n_out: int,
        factors: Callable[[int], tuple[Values, Values]],
    ) -> list[Piece]:
        """One piece an expert and place."""
        scale = module_scale(self._config, module.name, rank)
        places = self._names.places(module.name, n_out)
        self._check_sizes(module, places, n_in, n_out, stacked=True)

        def one(e: int, place: Place) -> Piece:
            own = Place(
                place.target, place.part, place.source_row, place.target_row, place.n_rows, e
            )

            def read() -> tuple[Values, Values]:
                a, b = factors(e)
                return a, b[own.source_row : own.source_row + own.n_rows]

            return Piece(module.name, own, rank, scale, read)

        for place in places:
            if self._facts.info.targets[place.target].ne[2] != n_expert:
                raise AdapterMismatchError(
                    f"{module.name}: the adapter has {n_expert} experts, the base "
                    f"{self._facts.info.targets[place.target].ne[2]}"
                )
        return [one(e, place) for place in places for e in range(n_expert)]

    def _n_expert(self, module: Module) -> int:
        for name in ("gate_up_proj", "gate_proj", "w1"):
            found = self._names.lookup(f"{module.name}.{name}")
            if found and f"{found}.weight" in self._facts.info.targets:
                return self._facts.info.targets[f"{found}.weight"].ne[2]
        counts = {
            target.ne[2]
            for name, target in self._facts.info.targets.items()
            if name.endswith("_exps.weight")
        }
        if len(counts) != 1:
            raise AdapterMismatchError(
                f"{module.name}: the base ({self._facts.info.arch}) has no experts",
                hint="was it made for another base model?",
            )
        return counts.pop()

    def _parameter(self, module: Module, n_a: int, n_b: int) -> tuple[str, bool]:
        """Which parameter a packed pair is for, and whether its factors are the other way round.

        PEFT's key does not say it; the sizes do, or else the nesting: gate_up_proj stands inside.
        """
        down = self._names.places(f"{module.name}.down_proj", self._facts.info.targets[
            "token_embd.weight"].ne[0])[0].target  # fmt: skip
        n_ff, n_embd = self._facts.info.targets[down].ne[:2]
        fits = {
            ("gate_up_proj", False): (n_embd, 2 * n_ff),
            ("gate_up_proj", True): (2 * n_ff, n_embd),
            ("down_proj", False): (n_ff, n_embd),
            ("down_proj", True): (n_embd, n_ff),
        }
        found = [key for key, sizes in fits.items() if sizes == (n_a, n_b)]
        if not found:
            raise AdapterMismatchError(
                f"{module.name}: the factors have sizes {n_a} and {n_b}, the base's experts "
                f"{n_embd} and {n_ff}",
                hint="was it made for another base model?",
            )
        if len(found) > 1:
            self.warnings.append(
                f"{module.name}: {n_a} and {n_b} fit several parameters; taken as {found[0][0]}"
            )
            nested = "gate_up_proj" if module.depth else "down_proj"
            found.sort(key=lambda key: (key[0] != nested, key[1]))
        return found[0]

    def _check_rank(self, module: Module, rank_a: int, rank_b: int) -> None:
        if rank_a != rank_b:
            raise AdapterFormatError(
                f"{module.name}: lora_A has rank {rank_a}, lora_B {rank_b}",
                hint="block-diagonal factors (BD-LoRA) are not supported",
            )

    def _check_sizes(
        self,
        module: Module,
        places: list[Place],
        n_in: int,
        n_out: int,
        *,
        stacked: bool = False,
    ) -> None:
        """`stacked`: the places are asked for before the experts are told apart."""
        for place in places:
            target = self._facts.info.targets[place.target]
            wanted = TargetKind.LINEAR if place.expert is None else TargetKind.EXPERTS
            if target.kind is not (TargetKind.EXPERTS if stacked else wanted):
                raise UnsupportedError(
                    f"{module.name}: a low-rank part does not apply to the base's {place.target}",
                    what=f"LoRA of {place.target}",
                )
            if place.expert is not None and place.expert >= target.ne[2]:
                raise AdapterMismatchError(
                    f"{module.name}: the adapter changes expert {place.expert}, the base has "
                    f"{target.ne[2]}",
                    hint="was it made for another base model?",
                )
            end = place.target_row + place.n_rows
            whole = place.target == f"{place.part}.weight" and place.target_row == 0
            if target.ne[0] != n_in or end > target.ne[1] or (whole and end != target.ne[1]):
                raise AdapterMismatchError(
                    f"{module.name}: the adapter was made for a weight of {n_in} by {n_out}, the "
                    f"base's {place.target} is {target.ne[0]} by {target.ne[1]}",
                    tensor=place.target,
                    hint="was it made for another base model?",
                )


def _wrong_shape(name: str, expected: str, got: tuple[int, ...]) -> AdapterFormatError:
    return AdapterFormatError(f"expected {expected}, got the shape {list(got)}", where=name[:200])
