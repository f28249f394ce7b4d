from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragraph.vocab.pieces import WHOLE, PieceIndex, decode
from loragraph.vocab.vocab import Vocab


@given(text=st.text(max_size=20), cut=st.integers(0, 80))
def test_a_text_decodes_the_same_in_two_parts(text: str, cut: int) -> None:
    """However valid UTF-8 is cut, its code points come out once, in order."""
    data = text.encode()
    first, partial = decode(data[:cut])
    second, rest = decode(data[cut:], partial)
    assert first + second == tuple(map(ord, text))
    assert rest == WHOLE


@pytest.mark.parametrize(
    ("piece", "partial", "expected"),
    [
        (b"a\xc3", WHOLE, ((97,), (3, 1))),
        (b"\xa9b", (3, 1), ((0xE9, 98), WHOLE)),
        (b"b", (3, 1), ((), (0, -1))),
        (b"a\x80", WHOLE, ((), (0, -1))),
        (b"\x80\x80", (0, 2), ((0,), WHOLE)),
        (b"", (3, 1), ((), (3, 1))),
    ],
)
def test_parts_of_characters(
    piece: bytes, partial: tuple[int, int], expected: tuple[tuple[int, ...], tuple[int, int]]
) -> None:
    """Unfinished, continued and broken characters, as llama-grammar.cpp reads them."""
    assert decode(piece, partial) == expected


def test_index_of_a_real_vocabulary(smollm: Vocab) -> None:
    """The order is sorted, its shared beginnings are right, and pieces are the vocabulary's."""
    index: PieceIndex = smollm.piece_index
    texts = [chars for chars, _, _ in index.order]
    assert texts == sorted(texts)
    for at in range(1, len(texts), 997):
        n = index.shared[at]
        assert texts[at][:n] == texts[at - 1][:n]
        assert texts[at][: n + 1] != texts[at - 1][: n + 1] or len(texts[at]) == n
    for token in range(0, smollm.n_tokens, 501):
        piece = b"" if smollm.is_eog(token) else smollm.piece(token).split(b"\0")[0]
        assert index.pieces[token] == piece
