"""Against libllama and the float64 reference, for every option of the llama family and every shape
of input: split files, chunks, long sequences, single-token steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.engine.model import Model
from tests.numerics.compare import max_abs, nmse, top_two_gap
from tests.numerics.runs import (
    EXACT,
    LIBLLAMA_MODES,
    LOWERINGS,
    MODES,
    LoweringName,
    Mode,
    Scales,
    libllama_logits,
    loragraph_logits,
    open_context,
    random_tokens,
)
from tests.oracle.libllama import Libllama
from tests.reference.llama import Active, ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

# Measured: at most 3e-13 against float64 and 2e-13 between the programs, over all options.
EXACT_NMSE = 2e-12
# Measured: 4e-9. F16 cells round alike in both unless a last bit differs.
FLASH_NMSE = 3e-8

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
    "uneven_gqa": {"n_head": 6, "n_head_kv": 2, "n_embd": 96, "n_ff": 64},
    "odd_widths": {"n_head": 3, "n_head_kv": 3, "n_embd": 36, "n_ff": 50, "n_vocab": 301},
    "one_layer": {"n_layer": 1, "n_vocab": 300, "vocab": "bpe"},
    "all": {
        "tied": True,
        "attn_bias": True,
        "ffn_bias": True,
        "rope_freqs": True,
        "rope_scaling": "yarn",
        "head_dim": 32,
        "n_head_kv": 1,
    },
}
CASES: tuple[Scales, ...] = ((0, 0), (1, 0), (-1, 0), (0.5, 1))


def _write(folder: Path, model: TinyLlama) -> tuple[Path, list[Path], list[Any]]:
    # libllama aborts on an adapter of a tied table.
    first = TinyAdapter(embeddings=not model.tied, output=not model.tied)
    second = TinyAdapter(
        rank={"attn_q": 2, "ffn_down": 5}, alpha=None, targets=("attn_q", "ffn_down"), seed=5
    )
    paths = [folder / "1.gguf", folder / "2.gguf"]
    arrays = [first.write(paths[0], model), second.write(paths[1], model)]
    return model.write(folder / "m.gguf"), paths, arrays


@pytest.mark.parametrize("option", OPTIONS)
def test_exact_mode_is_the_reference(option: str, tmp_path: Path) -> None:
    """Every option gives the float64 reference's logits, with and without adapters."""
    model = TinyLlama(**OPTIONS[option])
    base, paths, arrays = _write(tmp_path, model)
    tokens = random_tokens(40, model.n_vocab)
    reference = ReferenceLlama.load(base)
    for lowering in LOWERINGS:
        actual = loragraph_logits(base, paths, CASES, tokens, EXACT, lowering=lowering)
        for scales in CASES:
            active: list[Active] = list(zip(arrays, scales, strict=True))
            expected = reference.logits(tokens, active)
            assert nmse(actual[scales], expected) <= EXACT_NMSE, (lowering, scales)


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_agrees_with_libllama(option: str, mode: str, tmp_path: Path) -> None:
    """Every option gives libllama's logits: equal bits in branch, with no or one adapter.

    libllama multiplies w_s of the FFN into the low-rank part and the bias too, loragraph does not
    (as in attention): with such tensors only the base is compared here.
    """
    options = OPTIONS[option]
    if options.get("scales"):
        options = options | {"ffn_bias": False}
    model = TinyLlama(**options)
    base, paths, _ = _write(tmp_path, model)
    bound = EXACT_NMSE if mode == "exact" else FLASH_NMSE
    cases = CASES[:1] if model.scales else CASES
    tokens = random_tokens(40, model.n_vocab)
    expected = libllama_logits(base, paths, cases, tokens, LIBLLAMA_MODES[mode])
    for lowering in LOWERINGS:
        actual = loragraph_logits(
            base, paths, cases, tokens, LIBLLAMA_MODES[mode], lowering=lowering
        )
        for scales in cases:
            same_order = not any(scales) or (lowering == "branch" and not scales[1])
            difference = nmse(actual[scales], expected[scales])
            assert difference <= (0 if same_order else bound), (lowering, scales)


def test_adapters_of_the_attention_ignore_w_s_as_libllama_does(tmp_path: Path) -> None:
    """With scale tensors and an adapter of attention alone, the bits are libllama's."""
    model = TinyLlama(scales=True)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    TinyAdapter(targets=("attn_q", "attn_k", "attn_v", "attn_output")).write(path, model)
    tokens = random_tokens(20)
    expected = libllama_logits(base, [path], [(0.7,)], tokens)
    actual = loragraph_logits(base, [path], [(0.7,)], tokens)
    assert np.array_equal(actual[0.7,], expected[0.7,])


@pytest.mark.parametrize("n_files", [2, 3, 7])
def test_a_split_model_is_the_whole_one(n_files: int, tmp_path: Path) -> None:
    """A model in several files gives the bits of the same model in one."""
    model, tokens = TinyLlama(weight_type=GGMLType.Q4_0), random_tokens(20)
    parts = model.write_split(tmp_path, n_files)
    whole = loragraph_logits(model.write(tmp_path / "m.gguf"), [], [()], tokens)
    split = loragraph_logits(parts[0], [], [()], tokens)
    assert np.array_equal(split[()], whole[()])


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
def test_sequences_beyond_the_cell_quantum(chunk: int, mode: str, tmp_path: Path) -> None:
    """300 tokens, which cross the boundary of 256 cells, in calls of any length: libllama's bits.

    n_batch = 64 on both sides, so that a long call is chunked within it too.
    """
    model = TinyLlama(n_layer=1, n_embd=32, n_ff=32)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    TinyAdapter().write(path, model)
    tokens = random_tokens(300)
    cases: list[Scales] = [(0,), (0.5,)]
    kept: dict[str, Any] = {"n_ctx": 512, "chunk": chunk}
    expected = libllama_logits(
        base, [path], cases, tokens, LIBLLAMA_MODES[mode], n_ubatch=64, **kept
    )
    actual = loragraph_logits(base, [path], cases, tokens, LIBLLAMA_MODES[mode], n_batch=64, **kept)
    for scales in cases:
        assert np.array_equal(actual[scales], expected[scales]), scales


@pytest.mark.parametrize("n_ctx", [1, 37, 256, 300])
def test_contexts_of_any_size_are_filled_to_the_last_token(n_ctx: int, tmp_path: Path) -> None:
    """A full context gives the reference's logits, whether or not it is a multiple of 256."""
    base = TinyLlama(n_layer=1, n_embd=32, n_ff=32).write(tmp_path / "m.gguf")
    tokens = random_tokens(n_ctx)
    actual = loragraph_logits(base, [], [()], tokens, EXACT, n_ctx=n_ctx, n_batch=100)
    assert nmse(actual[()], ReferenceLlama.load(base).logits(tokens)) <= EXACT_NMSE


GREEDY: dict[str, tuple[float, float]] = {
    # Largest NMSE to libllama that test_types allows, and the least share of 60 tokens that it
    # leaves decided: of each the two best logits are farther apart than twice five deviations.
    "F32": (1e-6, 0.9),
    "Q4_0": (2e-4, 0.5),
    "Q4_1": (2e-4, 0.5),
    "Q8_0": (2e-4, 0.5),
    "Q6_K": (5e-4, 0.5),
}


@pytest.mark.parametrize("mode", ["flash", "default"])
@pytest.mark.parametrize("weight_type", GREEDY)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_greedy_text_is_libllamas(
    lowering: LoweringName, weight_type: str, mode: str, tmp_path: Path
) -> None:
    """Behind each token of libllama's greedy text, one call a token, its next one is ours too,
    unless the logit bound leaves it open; with libllama's own order of operations all 60 are."""
    model = TinyLlama(n_embd=256, n_ff=256, weight_type=GGMLType[weight_type])
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    TinyAdapter(rank=8, alpha=16).write(path, model)
    prompt, n = random_tokens(9), 60
    with Libllama(base, n_ctx=256, flash=True) as oracle:
        oracle.set_adapters({oracle.load_adapter(path): 0.5})
        expected = oracle.greedy_logits(prompt, n)
    text = expected.argmax(axis=1)
    with Model.load(base, n_threads=1) as loaded:
        adapter = loaded.load_adapter(path)
        with open_context(loaded, MODES[mode], lowering=lowering) as context:
            context.set_adapters({adapter: 0.5})
            rows = [context.decode(prompt, outputs="last")[0]]  # as the oracle asks for it
            rows += [context.decode([int(token)])[0] for token in text[:-1]]
    actual = np.stack(rows)
    if lowering == "branch" and mode == "flash":
        assert np.array_equal(actual, expected)
    error, share = GREEDY[weight_type]
    decided = top_two_gap(expected) > 2 * 5 * np.sqrt(error) * expected.std()
    assert decided.mean() >= share
    assert np.array_equal(actual.argmax(axis=1)[decided], text[decided])


def test_two_threads_give_the_bits_of_one(tmp_path: Path) -> None:
    """The number of threads does not change a result, in any lowering."""
    model, tokens = TinyLlama(), random_tokens(12)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    TinyAdapter(output=True, embeddings=True).write(path, model)
    for lowering in LOWERINGS:
        one, two = (
            loragraph_logits(
                base, [path], [(0.5,)], tokens, Mode("f16", "plain"), lowering=lowering, n_threads=n
            )[0.5,]
            for n in (1, 2)
        )
        assert max_abs(one, two) == 0
