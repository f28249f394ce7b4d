"""Adapters with DoRA and biases frozen into one by the engine: what the mix gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loragraph.engine.engine import Engine
from tests.graph.test_vectors import TinyDora
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyLlama

TINY = TinyLlama(n_ff=64)
ADAPTERS = {
    "dora": TinyDora(TinyAdapter(seed=1, embeddings=True, output=True)),
    "other": TinyDora(TinyAdapter(seed=2, rank=7, targets=("attn_q", "ffn_down"), alpha=5.0)),
    "bias": TinyDora(TinyAdapter(seed=5, targets=("attn_v",)), bias=True),
}


@pytest.mark.parametrize(
    "mix",
    [{"dora": 1.0}, {"dora": 0.3, "other": -0.7}, {"other": 1.0, "bias": 0.5}, {"bias": 2.0}],
    ids=["as it is", "two on a target", "disjoint", "a bias"],
)
def test_the_frozen_mix_gives_the_scores_of_the_mix(mix: dict[str, float], tmp_path: Path) -> None:
    """Log-probabilities of a text are the same, and not the base's."""
    base = TINY.write(tmp_path / "base.gguf")
    paths = {
        name: adapter.write(tmp_path / f"{name}.gguf", TINY) for name, adapter in ADAPTERS.items()
    }
    tokens = random_tokens(16)
    with Engine(base, paths, kv_type="f32", n_ctx=512, n_threads=1) as engine:
        engine.combine("frozen", mix)
        mixed, frozen, plain = (
            engine.score(tokens, adapters).logprobs for adapters in (mix, {"frozen": 1.0}, {})
        )
    np.testing.assert_allclose(frozen, mixed, atol=1e-4)
    assert np.abs(plain - mixed).max() > 1e-2
