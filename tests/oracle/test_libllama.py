"""The oracle itself: errors as text, owners, and the rules of libllama that others rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.gguf_bytes import RawTensor, tensor
from tests.numerics.compare import nmse
from tests.oracle.libllama import Libllama, LibllamaError
from tests.tiny import TinyAdapter, TinyLlama, write_adapter_raw

MODEL = TinyLlama()
TOKENS = [1, *range(40, 71)]
KEYS = TinyAdapter().keys()


@pytest.fixture
def oracle(tmp_path: Path) -> Iterator[Libllama]:
    with Libllama(MODEL.write(tmp_path / "m.gguf"), kv_type="f32") as opened:
        yield opened


def _pair(name: str, rank: int = 4, n_in: int = 64, n_out: int = 64) -> list[RawTensor]:
    return [
        tensor(f"{name}.lora_a", np.ones((rank, n_in))),
        tensor(f"{name}.lora_b", np.ones((n_out, rank))),
    ]


Q = "blk.0.attn_q.weight"
REFUSED = {
    "general.type": (KEYS | {"general.type": "model"}, _pair(Q), "expect general.type to be"),
    "architecture": (
        KEYS | {"general.architecture": "qwen2"},
        _pair(Q),
        "model arch and LoRA arch mismatch",
    ),
    "adapter.type": (KEYS | {"adapter.type": "ia3"}, _pair(Q), "expect adapter.type to be 'lora'"),
    "suffix": (KEYS, [tensor(f"{Q}.lora_c", np.ones(4))], "has unexpected suffix"),
    "half": (KEYS, _pair(Q)[:1], "is missing one component"),
    "name": (KEYS, _pair("blk.9.attn_q.weight"), "does not exist in base model"),
    "shape": (KEYS, _pair(Q, n_in=32), "has incorrect shape"),
    "transposed": (
        KEYS,
        [_pair(Q)[0], tensor(f"{Q}.lora_b", np.ones((64, 5)))],
        "lora_a tensor is not transposed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_carry_libllamas_text(case: str, oracle: Libllama, tmp_path: Path) -> None:
    """An adapter that libllama refuses raises with what libllama logged."""
    keys, tensors, message = REFUSED[case]
    path = write_adapter_raw(tmp_path / "a.gguf", keys, tensors)
    with pytest.raises(LibllamaError, match=message):
        oracle.load_adapter(path)


def test_missing_files_carry_libllamas_text(oracle: Libllama, tmp_path: Path) -> None:
    """Neither a missing adapter nor a missing model passes in silence."""
    with pytest.raises(LibllamaError, match="failed to open"):
        oracle.load_adapter(tmp_path / "none.gguf")
    with pytest.raises(LibllamaError, match="failed to open"):
        Libllama(tmp_path / "none.gguf")


def test_norm_tensors_and_empty_adapters_load(oracle: Libllama, tmp_path: Path) -> None:
    """libllama skips norm tensors and takes an adapter without tensors; both change nothing."""
    before = oracle.logits(TOKENS)
    norm = [tensor("blk.0.attn_norm.weight", np.ones(64))]
    handles = [
        oracle.load_adapter(write_adapter_raw(tmp_path / name, KEYS, tensors))
        for name, tensors in (("norm.gguf", norm), ("empty.gguf", []))
    ]
    oracle.set_adapters(dict.fromkeys(handles, 1.0))
    assert np.array_equal(oracle.logits(TOKENS), before)


def test_scale_zero_and_detached_are_the_base(oracle: Libllama, tmp_path: Path) -> None:
    """An adapter at scale 0, or taken away again, leaves the base's bits."""
    TinyAdapter().write(tmp_path / "a.gguf", MODEL)
    handle = oracle.load_adapter(tmp_path / "a.gguf")
    base = oracle.logits(TOKENS)
    oracle.set_adapters({handle: 1.0})
    assert nmse(oracle.logits(TOKENS), base) > 0.1
    for scales in ({handle: 0.0}, {}):
        oracle.set_adapters(scales)
        assert np.array_equal(oracle.logits(TOKENS), base)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_alpha_missing_or_zero_means_the_users_scale(
    alpha: float | None, oracle: Libllama, tmp_path: Path
) -> None:
    """Without alpha the factor is the user's scale alone, as if alpha were the rank."""
    TinyAdapter(alpha=alpha).write(tmp_path / "without.gguf", MODEL)
    TinyAdapter(alpha=4.0, rank=4).write(tmp_path / "with.gguf", MODEL)
    without, with_rank = (
        oracle.load_adapter(tmp_path / name) for name in ("without.gguf", "with.gguf")
    )
    oracle.set_adapters({without: 0.5})
    logits = oracle.logits(TOKENS)
    oracle.set_adapters({with_rank: 0.5})
    assert np.array_equal(oracle.logits(TOKENS), logits)


def test_chunks_give_the_same_logits(oracle: Libllama) -> None:
    """A prompt decoded in chunks equals the whole within F32 rounding (measured 2e-14)."""
    whole = oracle.logits(TOKENS)
    assert whole.shape == (len(TOKENS), MODEL.n_vocab)
    for chunk in (1, 7):
        assert nmse(oracle.logits(TOKENS, chunk), whole) <= 1e-12


def test_greedy_follows_its_own_logits(oracle: Libllama) -> None:
    """Greedy text is the argmax chain, and is reproduced by one pass over prompt and text."""
    text = oracle.greedy(TOKENS, 12)
    again = oracle.logits([*TOKENS, *text])[len(TOKENS) - 1 : -1].argmax(axis=1)
    assert again.tolist() == text


def test_reused_graphs_are_counted(oracle: Libllama) -> None:
    """Equal decode shapes reuse the graph; the counter shows it."""
    oracle.greedy(TOKENS, 10)
    before = oracle.n_reused
    oracle.greedy(TOKENS, 10)
    assert oracle.n_reused - before >= 8


@pytest.mark.parametrize("options", [{"use_mmap": False}, {"repack": False}])
def test_placement_options_keep_f32_bits(
    options: dict[str, Any], oracle: Libllama, tmp_path: Path
) -> None:
    """Mapping and repacking are choices of memory, not of numbers, for an F32 base."""
    with Libllama(tmp_path / "m.gguf", kv_type="f32", **options) as other:
        assert np.array_equal(other.logits(TOKENS), oracle.logits(TOKENS))


def test_repacking_can_be_refused(tmp_path: Path) -> None:
    """With repack=False the log names no repack buffer."""
    model = TinyLlama(weight_type=GGMLQuantizationType.Q4_0)
    path = model.write(tmp_path / "m.gguf")
    with Libllama(path, repack=False) as oracle:
        assert "REPACK" not in oracle.log.text


def test_nothing_reaches_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loading, decoding, refusing and closing are silent."""
    with Libllama(MODEL.write(tmp_path / "m.gguf")) as oracle:
        oracle.logits(TOKENS)
        with pytest.raises(LibllamaError):
            oracle.load_adapter(tmp_path / "m.gguf")
    oracle.close()
    assert capfd.readouterr() == ("", "")


def test_adapter_metadata_and_invocation_tokens(oracle: Libllama, tmp_path: Path) -> None:
    """Metadata is read back as libllama prints it; a plain adapter has no invocation tokens."""
    keys = {"adapter.lora.task_name": "sql", "adapter.lora.prompt_prefix": "SELECT "}
    TinyAdapter(metadata=keys, invocation_tokens=[7, 8, 9]).write(tmp_path / "a.gguf", MODEL)
    TinyAdapter().write(tmp_path / "b.gguf", MODEL)
    first, second = (oracle.load_adapter(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    read = oracle.adapter_metadata(first)
    assert read.items() >= keys.items()
    assert read["adapter.lora.alpha"] == "8.000000"
    assert oracle.invocation_tokens(first) == [7, 8, 9]
    assert oracle.invocation_tokens(second) == []


def test_last_output_alone(oracle: Libllama) -> None:
    """Asking for the last token's logits alone gives the last row of all."""
    whole = oracle.logits(TOKENS)
    oracle.clear()
    last = oracle.decode(TOKENS, last_only=True)
    assert last.shape == (1, MODEL.n_vocab)
    assert nmse(last[0], whole[-1]) <= 1e-12
