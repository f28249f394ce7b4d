"""The float64 reference agrees with libllama in its exact mode: F32 weights and cells, no flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.numerics.compare import nmse
from tests.oracle.libllama import Libllama
from tests.reference.llama import Active, ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

TOKENS: list[int] = np.random.default_rng(3).integers(3, 320, 48).tolist()

# Measured 3e-14 to 3e-13 over all options below: float32 rounding and nothing else.
EXACT_NMSE = 2e-12

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "attn_bias": {"attn_bias": True},
    "ffn_bias": {"ffn_bias": True},
    "rope_freqs": {"rope_freqs": True},
    "linear": {"rope_scaling": "linear"},
    "yarn": {"rope_scaling": "yarn"},
    "yarn+freqs": {"rope_scaling": "yarn", "rope_freqs": True, "rope_factor": 8.0},
    "short_yarn": {"rope_scaling": "yarn", "rope_orig_ctx": 32, "rope_base": 500000.0},
    "scales": {"scales": True},
    "scales+bias": {"scales": True, "ffn_bias": True, "attn_bias": True},
    "head_dim": {"head_dim": 32},
    "mha": {"n_head_kv": 4},
    "mqa": {"n_head_kv": 1},
    "one_layer": {"n_layer": 1, "n_vocab": 300, "vocab": "bpe"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_agrees_with_libllama(option: str, tmp_path: Path) -> None:
    """Base, one adapter at scales 1, 0.5 and -1, and two at once, give libllama's logits."""
    model = TinyLlama(**OPTIONS[option])
    path = model.write(tmp_path / "m.gguf")
    # libllama aborts on an adapter of a tied table.
    first = TinyAdapter(embeddings=not model.tied, output=not model.tied)
    second = TinyAdapter(
        rank={"attn_q": 2}, alpha=None, targets=("attn_q", "ffn_down"), layers=(0,), seed=5
    )
    arrays = [first.write(tmp_path / "1.gguf", model), second.write(tmp_path / "2.gguf", model)]
    reference = ReferenceLlama.load(path, ffn_scale_last=True)
    tokens = [token % model.n_vocab for token in TOKENS]
    with Libllama(path, kv_type="f32") as oracle:
        handles = [oracle.load_adapter(tmp_path / name) for name in ("1.gguf", "2.gguf")]
        for scales in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (-1.0, 0.0), (0.5, 1.0)):
            oracle.set_adapters(dict(zip(handles, scales, strict=True)))
            active: list[Active] = list(zip(arrays, scales, strict=True))
            logits = oracle.logits(tokens)
            assert 0.5 < logits.std() < 4
            assert nmse(logits, reference.logits(tokens, active)) <= EXACT_NMSE


# Bounds at twice to thrice the measured value: libllama rounds activations to the type's own.
BASE_NMSE = {"F16": 5e-7, "BF16": 3e-5, "Q8_0": 4e-4, "Q4_0": 4e-4, "Q4_K": 8e-4, "Q6_K": 8e-4}


@pytest.mark.parametrize("name", BASE_NMSE)
def test_quantised_bases(name: str, tmp_path: Path) -> None:
    """On the dequantised weights the reference is as near as libllama's rounding allows."""
    type = GGMLQuantizationType[name]
    path = TinyLlama(n_embd=256, n_ff=256, weight_type=type).write(tmp_path / "m.gguf")
    reference = ReferenceLlama.load(path)
    with Libllama(path, kv_type="f32") as oracle:
        assert nmse(oracle.logits(TOKENS), reference.logits(TOKENS)) <= BASE_NMSE[name]


# Measured 4e-14, 9e-10, 5e-8 and 6e-7; the adapter itself changes the logits by 1e-2.
ADAPTER_NMSE = {"F32": EXACT_NMSE, "F16": 3e-9, "BF16": 2e-7, "Q8_0": 2e-6}


@pytest.mark.parametrize("name", ADAPTER_NMSE)
def test_adapter_types(name: str, tmp_path: Path) -> None:
    """Adapters of every type that libllama's converter writes, on an F32 base."""
    model = TinyLlama()
    path = model.write(tmp_path / "m.gguf")
    adapter = TinyAdapter(rank=32, dtype=GGMLQuantizationType[name], b_std=0.04, output=True)
    arrays = adapter.write(tmp_path / "a.gguf", model)
    reference = ReferenceLlama.load(path)
    with Libllama(path, kv_type="f32") as oracle:
        oracle.set_adapters({oracle.load_adapter(tmp_path / "a.gguf"): 1.0})
        logits = oracle.logits(TOKENS)
    assert nmse(logits, reference.logits(TOKENS, [(arrays, 1.0)])) <= ADAPTER_NMSE[name]
    assert nmse(logits, reference.logits(TOKENS)) > 1e-3


def test_default_mode_of_libllama(tmp_path: Path) -> None:
    """F16 cells and flash attention stay within 1e-6 of the reference (measured 2e-7)."""
    path = TinyLlama(n_embd=256, n_ff=256).write(tmp_path / "m.gguf")
    expected = ReferenceLlama.load(path).logits(TOKENS)
    with Libllama(path, flash=True) as oracle:
        assert nmse(oracle.logits(TOKENS), expected) <= 1e-6


def test_scale_tensors_of_the_ffn_come_last_in_libllama(tmp_path: Path) -> None:
    """libllama multiplies w_s of the FFN into the low-rank part too; in attention it does not."""
    model = TinyLlama(scales=True)
    path = model.write(tmp_path / "m.gguf")
    base_only = ReferenceLlama.load(path)
    arrays = TinyAdapter().write(tmp_path / "a.gguf", model)
    with Libllama(path, kv_type="f32") as oracle:
        assert nmse(oracle.logits(TOKENS), base_only.logits(TOKENS)) <= EXACT_NMSE
        oracle.set_adapters({oracle.load_adapter(tmp_path / "a.gguf"): 1.0})
        assert nmse(oracle.logits(TOKENS), base_only.logits(TOKENS, [(arrays, 1.0)])) > 1e-3


def test_scales_per_token(tmp_path: Path) -> None:
    """Tokens before the adapter's first one keep the base's logits; the rest see its cells."""
    model = TinyLlama()
    reference = ReferenceLlama.load(model.write(tmp_path / "m.gguf"))
    arrays = TinyAdapter(embeddings=True).arrays(model)
    base = reference.logits(TOKENS)
    scales = np.where(np.arange(len(TOKENS)) < 20, 0.0, 1.0)
    mixed = reference.logits(TOKENS, [(arrays, scales)])
    assert np.array_equal(mixed[:20], base[:20])
    whole = reference.logits(TOKENS, [(arrays, 1.0)])
    assert nmse(mixed[20:], whole[20:]) > 1e-3
    same = reference.logits(TOKENS, [(arrays, np.ones(len(TOKENS)))])
    assert nmse(same, whole) <= 1e-28


def test_split_model(tmp_path: Path) -> None:
    """All files of a split model give the whole model's logits."""
    model = TinyLlama()
    whole = ReferenceLlama.load(model.write(tmp_path / "m.gguf"))
    split = ReferenceLlama.load(*model.write_split(tmp_path, 2))
    assert np.array_equal(whole.logits(TOKENS), split.logits(TOKENS))
