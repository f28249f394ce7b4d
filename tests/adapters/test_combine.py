"""Adapters frozen into one: the same deltas, whatever their ranks, types and scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.combine import combine
from loragraph.adapters.gguf import read_adapter
from loragraph.adapters.mix import Mix
from loragraph.errors import InvalidRequestError
from loragraph.ggml.handles import F16, F32
from loragraph.ggml.lib import load_library
from tests.tiny import TinyAdapter, TinyLlama

TINY = TinyLlama(tied=True)


def read(folder: Path, adapter: TinyAdapter) -> Adapter:
    """The adapter through a file."""
    path = folder / f"{abs(hash(repr(adapter)))}.gguf"
    adapter.write(path, TINY)
    return read_adapter(load_library(), path, None)


def delta(adapter: Adapter, target: str, scale: float) -> NDArray[np.float64]:
    """scale B A, (n_out, n_in) f64; for the token table (n_vocab, n_embd)."""
    pair = adapter.pairs.get(target)
    if pair is None:
        return np.zeros(1)
    a, b = (adapter.array(half).astype(np.float64) for half in (pair.a, pair.b))
    factor = adapter.effective_scale(target, scale)
    product: NDArray[np.float64] = factor * (a @ b.T if target.startswith("token_embd") else b @ a)
    return product


@pytest.mark.parametrize(
    "adapters",
    [
        [TinyAdapter(rank=2), TinyAdapter(rank=5, seed=2)],
        [TinyAdapter(dtype=GGMLType.F16), TinyAdapter(dtype=GGMLType.F16, seed=2, alpha=3.0)],
        [TinyAdapter(dtype=GGMLType.BF16), TinyAdapter(seed=2, alpha=None)],
        [TinyAdapter(rank=32, dtype=GGMLType.Q8_0, targets=("attn_q",)), TinyAdapter(seed=2)],
        [TinyAdapter(targets=("attn_q",)), TinyAdapter(targets=("ffn_up",), seed=2)],
        [TinyAdapter(embeddings=True, output=True), TinyAdapter(embeddings=True, seed=3)],
    ],
    ids=["ranks", "F16", "BF16 and F32", "Q8_0 and F32", "disjoint", "token table"],
)
def test_the_delta_is_the_sum_of_deltas(adapters: list[TinyAdapter], tmp_path: Path) -> None:
    """For every target, to f32 rounding; ranks add up."""
    loaded = [read(tmp_path, adapter) for adapter in adapters]
    scales = [0.7, -0.3]
    combined = combine(Mix(dict(zip(loaded, scales, strict=True))))
    targets = {target for adapter in loaded for target in adapter.pairs}
    assert combined.pairs.keys() == targets
    for target in targets:
        parts = [delta(one, target, scale) for one, scale in zip(loaded, scales, strict=True)]
        expected = parts[0] + parts[1]
        found = delta(combined, target, 1.0)
        assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()
        ranks = [one.pairs[target].rank for one in loaded if target in one.pairs]
        assert combined.pairs[target].rank == sum(ranks)


def test_types_are_kept_where_nothing_is_rounded(tmp_path: Path) -> None:
    """A's always, B's only where every scale is 1."""
    f16 = [
        read(tmp_path, TinyAdapter(alpha=a, dtype=GGMLType.F16, seed=s))
        for a, s in ((4, 1), (4, 2))
    ]
    whole = combine(Mix(dict.fromkeys(f16, 1.0)))
    half = combine(Mix(dict.fromkeys(f16, 0.7)))
    assert {(pair.a.type, pair.b.type) for pair in whole.pairs.values()} == {(F16, F16)}
    assert {(pair.a.type, pair.b.type) for pair in half.pairs.values()} == {(F16, F32)}


def test_what_cannot_be_one_adapter_is_refused(tmp_path: Path) -> None:
    """Nothing, and adapters that become active at unlike places."""
    with pytest.raises(InvalidRequestError, match="at least one"):
        combine(Mix())
    plain = read(tmp_path, TinyAdapter())
    alora = read(tmp_path, TinyAdapter(seed=2, invocation_tokens=[5, 6]))
    other = read(tmp_path, TinyAdapter(seed=3, invocation_tokens=[5, 6]))
    with pytest.raises(InvalidRequestError, match="invocation"):
        combine(Mix({plain: 1.0, alora: 1.0}))
    assert combine(Mix({alora: 1.0, other: 1.0})).invocation_tokens == (5, 6)
