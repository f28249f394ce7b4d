"""Hadamard-folded weights: the plain model's logits, adapters included, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from loragraph.engine.model import Model
from loragraph.errors import FormatError, UnsupportedError
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    LOWERINGS,
    LoweringName,
    Mode,
    loragraph_logits,
    open_context,
    random_tokens,
    run,
)
from tests.tiny import TinyAdapter, TinyLlama, TinyModel
from tests.tiny_experts import TinyDeepSeek2, TinyMixtral, TinyQwen2MoE, TinyQwen3MoE
from tests.tiny_families import TinyPhi3, TinyQwen3
from tests.tiny_fold import TABLE, Folding, write_folded

TOKENS = random_tokens(60)
CELLS = Mode("f32", "cells")
BOUND = 2e-12  # NMSE: float32 rotations there and back
ORACLE = "LORAGRAPH_FOLD_ORACLE"
"""Names a Python that can import llama_cpp_py_sync >= 0.11739, whose libllama knows the keys."""

FOLDINGS: Mapping[str, tuple[TinyModel, Folding]] = {
    "signs": (TinyLlama(), Folding()),
    "no signs": (TinyLlama(), Folding(explicit=False, block_size=16)),
    "blocks of 64 in some": (
        TinyLlama(n_embd=128, n_ff=192),
        Folding(block_size=64, plain=("attn_v.weight", "ffn_up.weight")),
    ),
    "latent table": (TinyLlama(), Folding(latent=True)),
    "tied": (TinyLlama(tied=True), Folding(tied=True)),
    "scales and biases": (TinyLlama(scales=True, attn_bias=True), Folding(latent=True)),
    "qwen3": (TinyQwen3(), Folding(latent=True)),
    "phi3 fused": (TinyPhi3(), Folding(block_size=8)),
    "experts": (TinyQwen2MoE(), Folding(latent=True)),
    "experts behind a plain router": (TinyQwen2MoE(), Folding(plain=("ffn_gate_inp.weight",))),
    "fused": (TinyLlama(fused_qkv=True), Folding()),
    "mixtral, scales": (TinyMixtral(scales=True), Folding(plain=("ffn_gate_inp.weight",))),
    "qwen3moe": (TinyQwen3MoE(), Folding(latent=True, plain=("ffn_gate_inp.weight",))),
    "latent attention": (
        TinyDeepSeek2(n_lora_q=32),
        Folding(block_size=32, plain=("attn_k_b.weight", "attn_v_b.weight")),
    ),
}


class Files:
    """A model twice, plain and folded, and an adapter of every matrix that may have one."""

    def __init__(self, folder: Path, name: str) -> None:
        model, folding = FOLDINGS[name]
        self.plain = model.write(folder / "plain.gguf")
        self.folded = write_folded(model, folding, folder / "folded.gguf")
        is_latent = folding.latent or folding.tied
        self.adapter = folder / "a.gguf"
        TinyAdapter(embeddings=not is_latent, output=not model.tied, b_std=0.05).write(
            self.adapter, model
        )


@pytest.mark.parametrize("name", FOLDINGS)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_folded_model_is_the_plain_one(lowering: LoweringName, name: str, tmp_path: Path) -> None:
    """Base and adapter give the logits of the same model before it was folded: the base product
    reads the rotated activation, the low-rank part the plain one."""
    files = Files(tmp_path, name)
    cases = ((0.0,), (1.0,), (-0.5,))
    expected = loragraph_logits(files.plain, [files.adapter], cases, TOKENS, lowering=lowering)
    actual = loragraph_logits(
        files.folded, [files.adapter], cases, TOKENS, CELLS, lowering=lowering
    )
    for case in cases:
        assert nmse(actual[case], expected[case]) <= BOUND, case
    assert nmse(expected[1.0,], expected[0.0,]) > 1e-3


def test_weights_with_one_input_share_a_rotation(tmp_path: Path) -> None:
    """q, k and v read one rotated activation, gate and up another, whatever adapters there are."""
    model = TinyLlama()
    plain = model.write(tmp_path / "plain.gguf")
    folded = write_folded(model, Folding(), tmp_path / "folded.gguf")
    nodes = []
    for path in (plain, folded):
        with Model.load(path, n_threads=1) as loaded, open_context(loaded) as context:
            run(context, TOKENS[:4], {})
            nodes.append(context.counters.n_nodes)
    n_rotations = 4 * model.n_layer + 1  # q k v, attn_output, gate up, down; the head
    n_views = 2  # as blocks, and back: views stand in the graph too
    assert nodes[1] - nodes[0] == n_rotations * (2 + n_views)  # signs, product


REFUSED: Mapping[str, tuple[TinyModel, Folding, str]] = {
    "no version": (TinyLlama(), Folding(keys={"version": None}), "version"),
    "version 3": (TinyLlama(), Folding(keys={"version": np.uint32(3)}), "version: 3"),
    "version 2 untied": (
        TinyLlama(),
        Folding(latent=True, keys={"version": np.uint32(2)}),
        "version 2 requires tied_output=true",
    ),
    "version 1 tied": (
        TinyLlama(tied=True),
        Folding(tied=True, keys={"version": np.uint32(1)}),
        "version 1 forbids it",
    ),
    "tied with a head": (
        TinyLlama(),
        Folding(tied=True),
        "tied_output requires output.weight to be absent",
    ),
    "tied without a latent table": (
        TinyLlama(tied=True),
        Folding(tied=True, keys={"inverse_weight_names": None}),
        "tied_output requires a latent token embedding",
    ),
    "latent table of an untied head": (
        TinyLlama(tied=True),
        Folding(latent=True),
        "a tied Hadamard output requires version 2",
    ),
    "transform": (TinyLlama(), Folding(keys={"transform": "dct"}), "transform: dct"),
    "axis": (TinyLlama(), Folding(keys={"axis": "output"}), "axis: output"),
    "sign mode": (TinyLlama(), Folding(keys={"sign_mode": "random"}), "sign_mode: random"),
    "grouped heads": (TinyLlama(), Folding(keys={"gdn_v_grouped": True}), "gdn_v_grouped"),
    "block of 24": (TinyLlama(), Folding(keys={"block_size": np.uint32(24)}), "power of two"),
    "block of 0": (TinyLlama(), Folding(keys={"block_size": np.uint32(0)}), "power of two"),
    "huge block": (TinyLlama(), Folding(keys={"block_size": np.uint32(1 << 31)}), "power of two"),
    "block that does not divide": (
        TinyLlama(),
        Folding(keys={"block_size": np.uint32(64)}),
        "block size 64 does not divide input dimension 96",
    ),
    "no widths": (
        TinyLlama(),
        Folding(keys={"sign_widths": np.zeros(0, np.uint32)}),
        "sign_widths is empty",
    ),
    "a width twice": (
        TinyLlama(),
        Folding(keys={"sign_widths": np.array([64, 64], np.uint32)}),
        "each once",
    ),
    "a width of 0": (
        TinyLlama(),
        Folding(keys={"sign_widths": np.array([0, 160], np.uint32)}),
        "each once",
    ),
    "another width": (
        TinyLlama(),
        Folding(keys={"sign_widths": np.array([32, 128], np.uint32)}),
        "no sign vector for width",
    ),
    "too few signs": (
        TinyLlama(),
        Folding(keys={"sign_values": np.ones(5, np.int8)}),
        "length mismatch: expected 160, got 5",
    ),
    "a sign of 0": (
        TinyLlama(),
        Folding(keys={"sign_values": np.zeros(160, np.int8)}),
        r"must be \+/-1",
    ),
    "signs of floats": (
        TinyLlama(),
        Folding(keys={"sign_values": np.ones(160, np.float32)}),
        "expected integers",
    ),
    "no weights": (TinyLlama(), Folding(keys={"weight_names": []}), "weight_names is empty"),
    "a weight twice": (
        TinyLlama(),
        Folding(keys={"weight_names": ["output.weight"] * 2}),
        "duplicate prism.hadamard weight: output.weight",
    ),
    "a weight that is not there": (
        TinyLlama(),
        Folding(keys={"weight_names": ["blk.7.attn_q.weight"]}),
        "weight not found: blk.7.attn_q.weight",
    ),
    "a norm": (
        TinyLlama(),
        Folding(keys={"weight_names": ["output_norm.weight"]}),
        "not on a verified Hadamard-aware matmul path",
    ),
    "a table as a matrix": (
        TinyLlama(),
        Folding(keys={"weight_names": [TABLE]}),
        "not on a verified Hadamard-aware matmul path",
    ),
    "a matrix as a table": (
        TinyLlama(),
        Folding(plain=("output.weight",), keys={"inverse_weight_names": ["output.weight"]}),
        "not on a verified inverse-after-lookup table",
    ),
    "in both lists": (
        TinyLlama(),
        Folding(keys={"inverse_weight_names": ["output.weight"]}),
        "stands among both",
    ),
    "heads of latent attention": (
        TinyDeepSeek2(n_lora_q=32),
        Folding(block_size=8),
        "attn_k_b.weight' is not on a verified Hadamard-aware matmul path",
    ),
    "names that are numbers": (
        TinyLlama(),
        Folding(keys={"weight_names": np.ones(3, np.uint32)}),
        "array of strings",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused(case: str, tmp_path: Path) -> None:
    """Unknown versions and modes, and headers that contradict themselves or the tensors."""
    model, folding, message = REFUSED[case]
    path = write_folded(model, folding, tmp_path / "m.gguf")
    with pytest.raises((FormatError, UnsupportedError), match=message):
        Model.load(path, n_threads=1)


def test_an_adapter_of_a_latent_table_is_refused(tmp_path: Path) -> None:
    """With llama.cpp's reason; adapters of the matrices load."""
    model = TinyLlama()
    path = write_folded(model, Folding(latent=True), tmp_path / "m.gguf")
    TinyAdapter(embeddings=True).write(tmp_path / "table.gguf", model)
    TinyAdapter().write(tmp_path / "matrices.gguf", model)
    with Model.load(path, n_threads=1) as loaded:
        reason = "targets a prism.hadamard latent lookup table, which is not supported"
        with pytest.raises(UnsupportedError, match=f"'{TABLE}' {reason}"):
            loaded.load_adapter(tmp_path / "table.gguf")
        assert loaded.load_adapter(tmp_path / "matrices.gguf").pairs


VERIFIED = ("llama", "qwen3", "qwen3moe")
"""The families that the oracle folds; of folded weights it refuses adapters."""


@pytest.mark.parametrize(
    "name", [name for name, (model, _) in FOLDINGS.items() if model.arch in VERIFIED]
)
@pytest.mark.skipif(ORACLE not in os.environ, reason=f"{ORACLE} names no Python")
def test_agrees_with_a_libllama_that_knows_the_keys(name: str, tmp_path: Path) -> None:
    """The same logits from another program, in a process of its own: of the base, and with an
    adapter of the matrices that stayed plain."""
    model, folding = FOLDINGS[name]
    path = write_folded(model, folding, tmp_path / "m.gguf")
    plain = [target for target in model.targets if f"{target}.weight" in folding.plain]
    adapter = tmp_path / "a.gguf"
    TinyAdapter(targets=plain).write(adapter, model)
    scales = [0.0, 1.0, -0.5] if plain else [0.0]
    job = {
        "model": str(path),
        "adapter": str(adapter) if plain else None,
        "scales": scales,
        "tokens": TOKENS,
        "out": str(tmp_path / "logits.npy"),
    }
    script = Path(__file__).parents[1] / "oracle" / "fold_libllama.py"
    done = subprocess.run(
        [os.environ[ORACLE], str(script), json.dumps(job)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = np.load(tmp_path / "logits.npy")
    cases = [(scale,) for scale in scales]
    adapters = [adapter] if plain else []
    actual = loragraph_logits(path, adapters, cases if plain else [()], TOKENS)
    for rows, logits in zip(expected, actual.values(), strict=True):
        assert nmse(logits, rows) <= BOUND
    assert not plain or nmse(expected[1], expected[0]) > 1e-3
