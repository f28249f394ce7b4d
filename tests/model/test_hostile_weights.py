"""Weights that would crash or spoil a step: types, values, sizes of files that change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from loragraph import Context, Model
from loragraph.errors import GGUFError, UnsupportedError
from tests.gguf_bytes import RawTensor, gguf_bytes
from tests.tiny import TinyLlama

Q = GGMLQuantizationType
WIDE = TinyLlama(n_layer=1, n_embd=256, n_ff=256, n_vocab=272, tied=True)
WITHOUT_PRODUCT = (Q.Q8_K, Q.I8, Q.I16, Q.I32, Q.I64, Q.F64)


def write(path: Path, model: TinyLlama, changed: Mapping[str, RawTensor]) -> Path:
    """The model with some tensors replaced."""
    tensors = [changed.get(each.name, each) for each in model.raw_tensors()]
    path.write_bytes(gguf_bytes(model.metadata(), tensors))
    return path


def retyped(model: TinyLlama, name: str, kind: Q) -> RawTensor:
    """The tensor as zeros of another type."""
    old = next(each for each in model.raw_tensors() if each.name == name)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n_bytes = int(np.prod(old.shape)) // block * block_bytes
    return replace(old, type=int(kind), data=bytes(n_bytes))


# Q8_1 is left out: no file holds it, and the gguf package has another size for its blocks.
TYPES = [kind for kind in GGML_QUANT_SIZES if kind is not Q.Q8_1]


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type(tmp_path: Path, kind: Q, name: str, repack: bool) -> None:
    """Types with a dot product on the CPU give logits, as weight and as table; the others raise.

    ggml's own supports_op says yes to all of them and then calls a null pointer.
    """
    path = write(tmp_path / "base.gguf", WIDE, {name: retyped(WIDE, name, kind)})
    if kind in WITHOUT_PRODUCT:
        with pytest.raises(UnsupportedError, match=f"{name}: ggml cannot multiply"):
            Model.load(path, n_threads=1, repack=repack)
        return
    with (
        Model.load(path, n_threads=1, repack=repack) as model,
        Context(model, n_ctx=64) as ctx,
    ):
        assert ctx.decode([1, 2, 3]).shape == (3, WIDE.n_vocab)


NAN_BLOCK = b"\xff\x7f"  # NaN as F16, the scale in front of a block


@pytest.mark.parametrize(
    ("model", "name", "bad"),
    [
        (TinyLlama(n_layer=1), "blk.0.ffn_up.weight", b"\0\0\xc0\x7f"),
        (TinyLlama(n_layer=1), "output_norm.weight", b"\0\0\x80\xff"),
        (TinyLlama(n_layer=1, weight_type=Q.F16), "blk.0.attn_k.weight", b"\0\x7c"),
        (TinyLlama(n_layer=1, weight_type=Q.Q8_0), "token_embd.weight", NAN_BLOCK),
        (TinyLlama(n_layer=1, weight_type=Q.Q4_0), "output.weight", NAN_BLOCK),
        (replace(WIDE, weight_type=Q.Q4_K), "blk.0.ffn_up.weight", NAN_BLOCK),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_that_are_not_finite(
    tmp_path: Path, model: TinyLlama, name: str, bad: bytes
) -> None:
    """check_tensors names the tensor; without it the model loads, and its logits may show it.

    Not always: rounding activations to the types of quantised products swallows NaN.
    """
    old = next(each for each in model.raw_tensors() if each.name == name)
    data = bad + old.data[len(bad) :]
    path = write(tmp_path / "base.gguf", model, {name: replace(old, data=data)})
    with pytest.raises(GGUFError, match=f"{name}: expected finite values"):
        Model.load(path, n_threads=1, check_tensors=True)
    with Model.load(path, n_threads=1) as loaded, Context(loaded, n_ctx=320) as ctx:
        logits = ctx.decode(range(model.n_vocab), outputs="all")
    if model.weight_type in (Q.F32, Q.F16):
        assert not np.isfinite(logits).all()


def test_check_tensors_passes_a_right_model(tmp_path: Path) -> None:
    """Right weights of several types pass."""
    types = {"token_embd": Q.Q6_K, "ffn_up": Q.IQ4_XS, "attn_q": Q.BF16}
    path = replace(WIDE, weight_type=Q.Q4_K, types=types).write(tmp_path / "base.gguf")
    Model.load(path, n_threads=1, check_tensors=True).close()


def test_file_that_shrinks(tmp_path: Path) -> None:
    """The next step raises instead of reading lost pages; a restored file serves again."""
    path = TinyLlama().write(tmp_path / "base.gguf")
    data = path.read_bytes()
    with Model.load(path, n_threads=1) as model, Context(model, n_ctx=64) as ctx:
        expected = ctx.decode([1, 2])
        os.truncate(path, len(data) // 2)
        for _ in range(2):
            with pytest.raises(GGUFError, match="became shorter"):
                ctx.decode([3])
        assert ctx.n_past == 2
        path.write_bytes(data)
        ctx.clear()
        assert np.array_equal(ctx.decode([1, 2]), expected)


def test_file_that_shrinks_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading raises when the file is shorter than its header said a moment ago."""
    path = TinyLlama(weight_type=Q.Q4_0).write(tmp_path / "base.gguf")
    size = path.stat().st_size

    def shrink(done: int, total: int) -> None:
        os.truncate(path, size - 4096)

    with pytest.raises(GGUFError, match="shorter"):
        Model.load(path, n_threads=1, repack=False, progress=shrink)


def test_file_replaced_by_renaming(tmp_path: Path) -> None:
    """The loaded model goes on with the bytes that it mapped."""
    path = TinyLlama().write(tmp_path / "base.gguf")
    with Model.load(path, n_threads=1) as model, Context(model, n_ctx=64) as ctx:
        expected = ctx.decode([1, 2])
        other = TinyLlama(seed=7).write(tmp_path / "new.gguf")
        other.rename(path)
        ctx.clear()
        assert np.array_equal(ctx.decode([1, 2]), expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.factor", 1e-30),
        ("llama.rope.scaling.factor", -4.0),
        ("llama.rope.scale_linear", 1e30),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", np.float64(1e300)),
        ("llama.rope.scaling.attn_factor", np.float64(-1e300)),
        ("llama.attention.layer_norm_rms_epsilon", -1e-5),
        ("llama.attention.layer_norm_rms_epsilon", np.float64(1e39)),
    ],
)
def test_numbers_that_leave_f32(tmp_path: Path, key: str, value: Any) -> None:
    """Numbers that would be infinite or zero inside ggml are refused by the name of their key."""
    path = TinyLlama(n_layer=1, extra={key: value}).write(tmp_path / "base.gguf")
    with pytest.raises(GGUFError, match=rf"{key}: expected a value from"):
        Model.load(path, n_threads=1)


@pytest.mark.parametrize("key_value", [1, 319, 321, 2**31 - 1])
def test_vocab_size_beside_tokens(tmp_path: Path, key_value: int) -> None:
    """As in llama.cpp, the tokens decide how many rows the table has, not the key."""
    path = TinyLlama(n_layer=1, extra={"llama.vocab_size": key_value}).write(tmp_path / "b.gguf")
    with Model.load(path, n_threads=1) as model:
        assert model.hparams.n_vocab == model.vocab.n_tokens == 320
