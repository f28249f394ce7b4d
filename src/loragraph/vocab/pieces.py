"""The texts of all tokens, in an order in which a grammar can be matched against them at once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

Partial = tuple[int, int]
"""An unfinished UTF-8 character: (bits so far, bytes that are missing); (0, -1) is a broken one."""

WHOLE: Partial = (0, 0)
_LENGTH = (1,) * 8 + (0,) * 4 + (2, 2, 3, 4)  # of a character, by its first byte's upper four bits


def decode(piece: bytes, partial: Partial = WHOLE) -> tuple[tuple[int, ...], Partial]:
    """Code points of `piece` after an unfinished character, and the unfinished one at its end.

    As lenient as llama-grammar.cpp: a lead byte swallows what follows it.
    """
    if partial == WHOLE:
        with suppress(UnicodeDecodeError):  # much faster, and the same for valid text
            return tuple(map(ord, piece.decode())), WHOLE
    value, missing = partial
    chars: list[int] = []
    at = 0
    while at < len(piece) and missing > 0:
        if piece[at] >> 6 != 2:
            return (), (0, -1)
        value = (value << 6) + (piece[at] & 0x3F)
        at += 1
        missing -= 1
    if partial[1] > 0 and missing == 0:
        chars.append(value)
    while at < len(piece):
        missing = _LENGTH[piece[at] >> 4] - 1
        if missing < 0:
            return (), (0, -1)
        value = piece[at] & ((1 << (7 - missing)) - 1)
        at += 1
        while at < len(piece) and missing > 0:
            value = (value << 6) + (piece[at] & 0x3F)
            at += 1
            missing -= 1
        if missing == 0:
            chars.append(value)
    return tuple(chars), (value, missing) if missing else WHOLE


@dataclass(frozen=True)
class PieceIndex:
    """Pieces by token, and those that a text can have in the order of their code points."""

    pieces: list[bytes]  # by token, cut at a NUL; b"" for what is no text
    order: list[tuple[tuple[int, ...], Partial, int]]  # sorted (code points, rest, token)
    shared: list[int]  # per entry of `order`: leading code points shared with the one before
    ends: dict[int, int]  # first code point -> where its entries of `order` end
    continuations: list[int]  # tokens that begin inside a character

    @classmethod
    def build(cls, pieces: Iterable[bytes], excluded: frozenset[int]) -> PieceIndex:
        """Sorts the pieces; tokens in `excluded` (control tokens that end a text) have none."""
        cut = [
            b"" if token in excluded else piece.split(b"\0", 1)[0]
            for token, piece in enumerate(pieces)
        ]
        order = []
        for token, piece in enumerate(cut):
            chars, rest = decode(piece)
            if piece and rest[1] >= 0:
                order.append((chars, rest, token))
        order.sort()
        shared = [0] * len(order)
        for at in range(1, len(order)):
            shared[at] = _common(order[at - 1][0], order[at][0])
        continuations = [token for token, piece in enumerate(cut) if piece and piece[0] >> 6 == 2]
        ends = {entry[0][0]: at + 1 for at, entry in enumerate(order) if entry[0]}
        return cls(cut, order, shared, ends, continuations)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n
