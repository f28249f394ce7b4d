"""Metadata of a model: what is refused, what is optional, and what the numbers mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine.model import Model
from loragraph.errors import GGUFError, LoragraphError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import load_library
from loragraph.model.hparams import HParams, read_hparams
from loragraph.model.keys import Keys
from loragraph.model.rope import NORM
from tests.gguf_bytes import RawTensor
from tests.numerics.compare import nmse
from tests.numerics.runs import LIBLLAMA_MODES, loragraph_logits, random_tokens
from tests.oracle.libllama import Libllama
from tests.reference.llama import ReferenceLlama
from tests.tiny import TinyLlama, gguf_bytes, tensor

MISSING = object()
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


def write(path: Path, changes: dict[str, Any]) -> Path:
    """A tiny model with keys changed, or taken away where the value is MISSING."""
    model = TinyLlama()
    keys = {k: v for k, v in (model.metadata() | changes).items() if v is not MISSING}
    path.write_bytes(gguf_bytes(keys, model.raw_tensors()))
    return path


def read(path: Path, changes: dict[str, Any]) -> HParams:
    """The numbers of such a model."""
    with GGUFFile(load_library(), write(path / "m.gguf", changes)) as file:
        return read_hparams(Keys(file), NORM)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no block count": ({"llama.block_count": MISSING}, "llama.block_count"),
    "no width": ({"llama.embedding_length": MISSING}, "llama.embedding_length"),
    "no heads": ({"llama.attention.head_count": MISSING}, "llama.attention.head_count"),
    "no feed-forward width": ({"llama.feed_forward_length": MISSING}, "feed_forward_length"),
    "no context": ({"llama.context_length": MISSING}, "llama.context_length"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": MISSING}, "epsilon"),
    "no architecture": ({"general.architecture": MISSING}, "general.architecture"),
    "block count a string": ({"llama.block_count": "2"}, "expected type integer, got string"),
    "block count a float": ({"llama.block_count": 2.0}, "expected type integer, got f32"),
    "block count a bool": ({"llama.block_count": True}, "expected type integer, got bool"),
    "block count an array": ({"llama.block_count": [2, 2]}, "expected type integer, got array"),
    "epsilon an integer": ({"llama.attention.layer_norm_rms_epsilon": 1}, "expected type f32"),
    "epsilon negative": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "a value from 0"),
    "epsilon no number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "finite"),
    "architecture a number": ({"general.architecture": 5}, "expected type string"),
    "no layers": ({"llama.block_count": 0}, "from 1 to 1024"),
    "absurd layers": ({"llama.block_count": 10**9}, "from 1 to 1024"),
    "negative layers": ({"llama.block_count": -2}, "from 1 to 1024"),
    "no embedding": ({"llama.embedding_length": 0}, "llama.embedding_length"),
    "absurd embedding": ({"llama.embedding_length": 2**31}, "llama.embedding_length"),
    "zero heads": ({"llama.attention.head_count": 0}, "head_count"),
    "absurd heads": ({"llama.attention.head_count": 2**31}, "head_count"),
    "heads do not divide": ({"llama.attention.head_count": 6}, "multiple of the 6 heads"),
    "uneven groups": ({"llama.attention.head_count_kv": 3}, "multiple of the K/V heads"),
    "zero K/V heads": ({"llama.attention.head_count_kv": 0}, "head_count_kv"),
    "too few per layer": ({"llama.attention.head_count": [4]}, "expected 2 integers"),
    "too many per layer": ({"llama.feed_forward_length": [96, 96, 96]}, "expected 2 integers"),
    "floats per layer": ({"llama.feed_forward_length": [96.0, 96.0]}, "expected 2 integers"),
    "strings per layer": ({"llama.feed_forward_length": ["96", "96"]}, "array of numbers"),
    "zero in a layer": ({"llama.feed_forward_length": [96, 0]}, "from 1 to"),
    "negative in a layer": ({"llama.attention.head_count": [4, -4]}, "from 1 to"),
    "zero context": ({"llama.context_length": 0}, "llama.context_length"),
    "rotates half": ({"llama.rope.dimension_count": 8}, "invalid n_rot: 8"),
    "rotates nothing": ({"llama.rope.dimension_count": 0}, "rope.dimension_count"),
    "odd heads": (
        {"llama.attention.key_length": 15, "llama.attention.value_length": 15},
        "rope.dimension_count",
    ),
    "rope base zero": ({"llama.rope.freq_base": 0.0}, "a value from"),
    "rope base infinite": ({"llama.rope.freq_base": float("inf")}, "finite"),
    "rope factor negative": (YARN | {"llama.rope.scaling.factor": -2.0}, "a value from"),
    "longrope without factors": (
        {"llama.rope.scaling.type": "longrope"},
        "rope_factors_short.weight: missing tensor",
    ),
    "rope scaling a number": ({"llama.rope.scaling.type": 1}, "expected type string"),
    "vocabulary of none": (
        {"llama.vocab_size": 0, "tokenizer.ggml.tokens": MISSING},
        "llama.vocab_size",
    ),
    "no vocabulary at all": (
        {"llama.vocab_size": MISSING, "tokenizer.ggml.tokens": MISSING},
        "tokenizer.ggml.tokens",
    ),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_metadata_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A key that is missing, of a wrong type or absurd is a GGUFError that names it."""
    with pytest.raises(GGUFError, match=words):
        Model.load(write(tmp_path / "m.gguf", changes), n_threads=1)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gpt17"}, "architecture 'gpt17'.*supported: .*llama"),
    "adapter": ({"general.type": "adapter"}, "expected a base model, got general.type 'adapter'"),
    "rope scaling": ({"llama.rope.scaling.type": "ntk"}, "none, linear, yarn or longrope"),
    "both directions": ({"llama.attention.causal": False}, "reads text and writes none"),
    "unlike layers": ({"llama.attention.key_length_swa": 32}, "unlike the other layers' 16"),
    "unlike heads": (
        {"llama.attention.key_length": 16, "llama.attention.value_length": 32},
        "K heads of 16 and V heads of 32",
    ),
}


@pytest.mark.parametrize(("changes", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_implemented_says_so(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Well-formed models that loragraph does not compute are an UnsupportedError."""
    with pytest.raises(UnsupportedError, match=words):
        Model.load(write(tmp_path / "m.gguf", changes), n_threads=1)


def test_defaults(tmp_path: Path) -> None:
    """Optional keys have llama.cpp's defaults."""
    optional = (
        "general.name",
        "llama.attention.head_count_kv",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "llama.vocab_size",
    )
    hparams = read(tmp_path, dict.fromkeys(optional, MISSING))
    assert hparams.name == "m"
    assert hparams.n_head_kv == hparams.n_head == (4, 4)
    assert hparams.n_vocab == 320
    assert hparams.rope.n_rot == hparams.n_embd_head == 16
    assert (hparams.rope.freq_base, hparams.rope.freq_scale) == (10000.0, 1.0)
    assert (hparams.rope.ext_factor, hparams.rope.attn_factor) == (0.0, 1.0)
    assert hparams.rope.n_ctx_orig == hparams.n_ctx_train == 512


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64, np.int8])
def test_one_number_a_layer(dtype: Any, tmp_path: Path) -> None:
    """Head counts and widths may be arrays of any integer type, one number a layer."""
    hparams = read(
        tmp_path,
        {
            "llama.attention.head_count": np.array([4, 2], dtype),
            "llama.attention.head_count_kv": np.array([2, 1], dtype),
            "llama.feed_forward_length": np.array([96, 32], dtype),
        },
    )
    assert (hparams.n_head, hparams.n_head_kv, hparams.n_ff) == ((4, 2), (2, 1), (96, 32))
    assert [hparams.n_embd_k(il) for il in range(2)] == [32, 16]


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 8.0},
    "linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0},
    "linear, old key": {"llama.rope.scale_linear": 8.0},
    "factor alone": {"llama.rope.scaling.factor": 3.0},
    "yarn": YARN | {"llama.rope.scaling.original_context_length": 64},
    "yarn, attn_factor": YARN | {"llama.rope.scaling.attn_factor": 1.5},
    "yarn, no original context": YARN,
    "yarn, factor below one": YARN | {"llama.rope.scaling.factor": 0.5},
}


@pytest.mark.parametrize("changes", SCALINGS.values(), ids=SCALINGS)
def test_rope_scaling_is_libllamas(changes: dict[str, Any], tmp_path: Path) -> None:
    """Every way to write a rope scaling gives libllama's bits."""
    path = write(tmp_path / "m.gguf", changes)
    tokens = random_tokens(40)
    with Libllama(path, n_ctx=256, kv_type="f32") as oracle:
        expected = oracle.logits(tokens)
    assert nmse(loragraph_logits(path, [], [()], tokens)[()], expected) == 0


def mixed_layers(path: Path, second: list[RawTensor], changes: dict[str, Any]) -> Path:
    """The tiny model with layer 1 from `second`."""
    tensors = [t for t in TinyLlama().raw_tensors() if not t.name.startswith("blk.1.")]
    tensors += [t for t in second if t.name.startswith("blk.1.")]
    path.write_bytes(gguf_bytes(TinyLlama().metadata() | changes, tensors))
    return path


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
def test_layers_of_unlike_widths(mode: str, tmp_path: Path) -> None:
    """A model whose layers differ in feed-forward width (libllama has none)."""
    path = mixed_layers(
        tmp_path / "m.gguf",
        TinyLlama(n_ff=32).raw_tensors(),
        {"llama.feed_forward_length": [96, 32]},
    )
    tokens = random_tokens(20)
    actual = loragraph_logits(path, [], [()], tokens, LIBLLAMA_MODES[mode])
    bound = 2e-12 if mode == "exact" else 5e-6
    assert nmse(actual[()], ReferenceLlama.load(path).logits(tokens)) <= bound


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
def test_layers_of_unlike_heads(mode: str, tmp_path: Path) -> None:
    """A layer with one K/V head is a layer with two equal ones (libllama has no such models)."""
    narrow = TinyLlama(n_head_kv=1)
    doubled = [
        tensor(name, np.tile(array, (2, 1)) if "attn_k." in name or "attn_v." in name else array)
        for name, array in narrow.arrays.items()
    ]
    one = mixed_layers(
        tmp_path / "1.gguf", narrow.raw_tensors(), {"llama.attention.head_count_kv": [2, 1]}
    )
    two = mixed_layers(tmp_path / "2.gguf", doubled, {})
    tokens = random_tokens(20)
    expected = loragraph_logits(two, [], [()], tokens, LIBLLAMA_MODES[mode])
    actual = loragraph_logits(one, [], [()], tokens, LIBLLAMA_MODES[mode])
    assert nmse(actual[()], expected[()]) <= 2e-12


def test_a_mistake_costs_no_memory(tmp_path: Path) -> None:
    """Metadata that promises a huge model fails before anything is allocated."""
    changes = {"llama.embedding_length": 1 << 24, "llama.feed_forward_length": 1 << 24}
    with pytest.raises(LoragraphError):
        Model.load(write(tmp_path / "m.gguf", changes), n_threads=1)
