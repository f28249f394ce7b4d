"""The generated files are what they claim to be, read by the gguf package and by libllama."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from tests.gguf_bytes import RawTensor, Value, gguf_bytes, quantised, tensor, write_gguf
from tests.numerics.compare import nmse
from tests.oracle.libllama import Libllama, LibllamaError
from tests.reference.adapter import dequantised, read_adapter, read_metadata, read_tensors
from tests.tiny import TinyAdapter, TinyLlama, write_adapter_raw

# Measured on normal values in rows of 256; what a coarser type may lose is its own property.
QUANTISATION_NMSE = {
    "F32": 0.0,
    "F16": 1e-7,
    "BF16": 4e-6,
    "Q8_0": 5e-5,
    "Q4_0": 0.01,
    "Q4_1": 0.01,
    "Q5_0": 3e-3,
    "Q5_1": 3e-3,
    "Q2_K": 0.1,
    "Q3_K": 0.03,
    "Q4_K": 0.01,
    "Q5_K": 3e-3,
    "Q6_K": 5e-4,
    "IQ4_NL": 0.01,
    "IQ4_XS": 0.01,
    "MXFP4": 0.03,
}


def test_equal_arguments_give_equal_bytes() -> None:
    """A model and an adapter are functions of their arguments."""
    assert TinyLlama().to_bytes() == TinyLlama().to_bytes()
    assert TinyLlama().to_bytes() != TinyLlama(seed=1).to_bytes()
    model = TinyLlama()
    assert TinyAdapter().to_bytes(model) == TinyAdapter().to_bytes(model)


def test_an_option_does_not_change_other_tensors() -> None:
    """Adding biases, scales and frequency factors leaves every weight as it was."""
    plain = TinyLlama().arrays
    rich = TinyLlama(attn_bias=True, ffn_bias=True, scales=True, rope_freqs=True).arrays
    assert len(rich) == len(plain) + 1 + 2 * 14
    assert all(np.array_equal(rich[name], values) for name, values in plain.items())


def test_model_reads_back(tmp_path: Path) -> None:
    """The gguf package reads the same tensors and metadata."""
    model = TinyLlama(tied=True, attn_bias=True)
    path = model.write(tmp_path / "m.gguf")
    tensors = read_tensors(path)
    assert "output.weight" not in tensors
    assert list(tensors) == list(model.arrays)
    assert all(np.array_equal(tensors[name], model.arrays[name]) for name in tensors)
    keys = read_metadata(path)
    assert keys["general.architecture"] == "llama"
    assert keys["llama.attention.head_count_kv"] == 2


@pytest.mark.parametrize("name", QUANTISATION_NMSE)
def test_quantised_rows_read_back(name: str) -> None:
    """Every type is written so that the gguf package's dequantiser gets the values back."""
    type = GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32)
    back = dequantised(quantised(values, type), values.shape, type)
    assert nmse(back, values) <= QUANTISATION_NMSE[name]


def test_rows_that_are_no_multiple_of_the_block_are_refused() -> None:
    """A wrong size is reported here instead of giving a shifted file."""
    with pytest.raises(ValueError, match="Q4_K needs rows of a multiple of 256"):
        TinyLlama(weight_type=GGMLQuantizationType.Q4_K).to_bytes()


def test_types_by_tensor_name(tmp_path: Path) -> None:
    """A type can be chosen for one tensor or for all of one target."""
    q8_0, f16 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16
    model = TinyLlama(weight_type=q8_0, types={"output": f16, "ffn_up": f16})
    path = model.write(tmp_path / "m.gguf")
    types = {item.name: item.tensor_type for item in GGUFReader(path, "r").tensors}
    assert types["output.weight"] == types["blk.1.ffn_up.weight"] == f16
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == q8_0
    assert types["blk.0.attn_norm.weight"] == GGMLQuantizationType.F32


def test_adapter_reads_back(tmp_path: Path) -> None:
    """Pairs and alpha in the file are those that write() gives."""
    adapter = TinyAdapter(
        rank={"attn_q": 2}, embeddings=True, output=True, dtype=GGMLQuantizationType.BF16
    )
    given = adapter.write(tmp_path / "a.gguf", TinyLlama())
    read = read_adapter(tmp_path / "a.gguf")
    assert read.alpha == given.alpha == 8.0
    assert read.pairs.keys() == given.pairs.keys()
    for name, (a, b) in read.pairs.items():
        assert np.array_equal(a, given.pairs[name][0])
        assert np.array_equal(b, given.pairs[name][1])
    assert read.pairs["blk.1.attn_q.weight"][1].shape == (64, 2)
    assert read.pairs["token_embd.weight"][0].shape == (320, 4)
    assert read.pairs["token_embd.weight"][1].shape == (64, 4)


def test_adapter_metadata(tmp_path: Path) -> None:
    """Alpha can be missing, invocation tokens are u32, further keys are kept."""
    adapter = TinyAdapter(
        alpha=None, invocation_tokens=[5, 6], metadata={"adapter.lora.task_name": "sql"}
    )
    adapter.write(tmp_path / "a.gguf", TinyLlama())
    keys = read_metadata(tmp_path / "a.gguf")
    assert "adapter.lora.alpha" not in keys
    assert keys["adapter.alora.invocation_tokens"] == [5, 6]
    assert keys["adapter.lora.task_name"] == "sql"
    assert read_adapter(tmp_path / "a.gguf").alpha == 0.0


def test_wrong_files_are_written_as_told(tmp_path: Path) -> None:
    """Repeated names, unknown types and false counts reach the file unchanged."""
    twice = [tensor("x", np.ones((2, 3))), RawTensor("x", (1,), 99, b"\0" * 4, offset=2**40)]
    data = gguf_bytes([("k", np.int8(-1)), ("k", "text")], twice, version=7, n_tensors=2**60)
    assert data[4:8] == b"\x07\0\0\0"
    assert data[8:16] == (2**60).to_bytes(8, "little")
    assert data.count(b"\x01\0\0\0\0\0\0\0x") == 2
    assert (2**40).to_bytes(8, "little") in data
    assert gguf_bytes({}, [], magic=b"GGML")[:4] == b"GGML"
    path = write_adapter_raw(tmp_path / "a.gguf", {}, {"y.lora_a": np.ones(4, np.float32)})
    assert list(read_tensors(path)) == ["y.lora_a"]


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
def test_every_text_can_be_tokenised(vocab: Literal["spm", "bpe"], tmp_path: Path) -> None:
    """libllama tokenises any UTF-8 text and gives the same bytes back."""
    path = TinyLlama(vocab=vocab).write(tmp_path / "m.gguf")
    text = "The hello world\n\t é 漢 🙂 0x7f" + "".join(map(chr, range(1, 256)))
    with Libllama(path, vocab_only=True) as oracle:
        ids = oracle.tokenize(text, add_special=False, special=False)
        back = b"".join(oracle.piece(token) for token in ids).decode()
        assert back.removeprefix(" ") == text
        assert len(ids) < len(text.encode())
        chat = oracle.tokenize("<|im_start|>", add_special=False)
        assert [oracle.piece(token) for token in chat] == [b"<|im_start|>"]


def test_split_files_are_one_model(tmp_path: Path) -> None:
    """Parts named by the convention load as the whole file does, bit for bit."""
    model = TinyLlama()
    whole = model.write(tmp_path / "m.gguf")
    parts = model.write_split(tmp_path, 3)
    assert parts[2].name == "tiny-00003-of-00003.gguf"
    tokens = list(range(5, 20))
    with Libllama(whole) as one, Libllama(parts[0]) as split:
        assert np.array_equal(one.logits(tokens), split.logits(tokens))


def test_extra_metadata_overrides(tmp_path: Path) -> None:
    """A test can spoil any key."""
    path = TinyLlama(extra={"general.architecture": "none-such"}).write(tmp_path / "m.gguf")
    with pytest.raises(LibllamaError, match="unknown model architecture: 'none-such'"):
        Libllama(path)


def test_typed_metadata_survives(tmp_path: Path) -> None:
    """numpy scalars and arrays keep their GGUF type."""
    keys: dict[str, Value] = {
        "a": np.uint64(3),
        "b": np.asarray([1, 2], np.int16),
        "c": [0.5, 1],
        "d": True,
    }
    path = write_gguf(tmp_path / "k.gguf", keys, [])
    fields = GGUFReader(path, "r").fields
    kinds = {key: [kind.name for kind in fields[key].types] for key in keys}
    assert kinds == {
        "a": ["UINT64"],
        "b": ["ARRAY", "INT16"],
        "c": ["ARRAY", "FLOAT32"],
        "d": ["BOOL"],
    }
