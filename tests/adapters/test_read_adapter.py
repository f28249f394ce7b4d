"""Right files: values, metadata, scales, tied heads, report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from loragraph.adapters.adapter import ALIGNMENT, Adapter
from loragraph.adapters.base import base_info
from loragraph.adapters.gguf import check_adapter, read_adapter
from loragraph.errors import AdapterFormatError, InvalidRequestError
from loragraph.ggml.lib import Library
from tests.adapters.raw_gguf import (
    BF16,
    F16,
    F32,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_VOCAB,
    Q8_0,
    Raw,
    adapter_metadata,
    base,
    good_tensors,
    pair,
    tensor,
    write,
)

Q, EXPS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"
EMBD, OUT = "token_embd.weight", "output.weight"


@pytest.fixture
def load(lib: Library, tmp_path: Path) -> Any:
    """Writes a file and reads it as an adapter."""

    def load_(
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, Raw] | None = None,
        *,
        tied: bool = False,
        **options: Any,
    ) -> Adapter:
        path = write(tmp_path / "a.gguf", metadata, tensors)
        return read_adapter(lib, path, base(tied=tied), **options)

    return load_


def _gguf_values(raw: Raw) -> np.ndarray[Any, Any]:
    rows = np.frombuffer(raw.data, np.uint8)
    values = dequantize(rows, GGMLQuantizationType(raw.type))
    return values.reshape(tuple(reversed(raw.ne)))


@pytest.mark.parametrize("type_", [F32, F16, BF16, Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("target", [Q, EXPS, EMBD])
def test_values_are_those_of_the_gguf_package(load: Any, type_: Any, target: str) -> None:
    """Every type loads to exactly the values that the gguf package dequantises."""
    n_out = {Q: N_EMBD, EXPS: N_FF, EMBD: N_VOCAB}[target]
    n_expert = N_EXPERT if target == EXPS else 0
    tensors = pair(target, n_out=n_out, rank=32, type_=type_, n_expert=n_expert)
    adapter = load(None, tensors)
    loaded = adapter.pairs[target]
    for half, raw in zip((loaded.a, loaded.b), tensors.values(), strict=True):
        expected = _gguf_values(raw)
        assert adapter.array(half).dtype == np.float32
        assert adapter.array(half).shape == expected.shape
        np.testing.assert_array_equal(adapter.array(half), expected)
        assert adapter.raw(half).tobytes() == raw.data


def test_block_is_aligned_and_read_only(load: Any) -> None:
    """Every tensor starts on a cache line, none overlaps, and nobody can write."""
    adapter = load()
    halves = [half for pair_ in adapter.pairs.values() for half in (pair_.a, pair_.b)]
    end = 0
    for half in halves:
        assert half.offset >= end
        assert adapter.address(half) % ALIGNMENT == 0
        end = half.offset + half.nbytes
    assert end <= adapter.nbytes == len(adapter.data)
    with pytest.raises(ValueError, match="read-only"):
        adapter.data[0] = 1


def test_file_overwritten_in_place_changes_nothing(load: Any, tmp_path: Path) -> None:
    """The tensors are a copy."""
    adapter = load()
    before = adapter.data.tobytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(path.stat().st_size))
    assert adapter.data.tobytes() == before


def test_metadata(load: Any) -> None:
    """Task name, prompt prefix, invocation tokens and any other key are there."""
    adapter = load(
        adapter_metadata(
            adapter__lora__task_name="sql",
            adapter__lora__prompt_prefix="Q: ",
            adapter__alora__invocation_tokens=[7, 0, 4294967295],
            some__key=np.int32(-5),
        )
    )
    assert (adapter.task_name, adapter.prompt_prefix) == ("sql", "Q: ")
    assert adapter.invocation_tokens == (7, 0, 4294967295)
    assert adapter.metadata["some.key"] == -5
    assert adapter.metadata["general.type"] == "adapter"


def test_metadata_has_arrays(load: Any) -> None:
    """Arrays of any type are tuples; one as long as no key of an adapter is left out."""
    words = ["sql", "", "größer"]
    adapter = load(
        adapter_metadata(
            adapter__alora__invocation_tokens=[7, 8],
            adapter__lora__task_name=["a", "b"],
            general__tags=words,
            some__floats=np.array([0.5, -2], np.float32),
            some__bytes=np.zeros(1 << 16, np.uint8),
            too__long=np.zeros((1 << 16) + 1, np.uint8),
        )
    )
    assert adapter.metadata["adapter.alora.invocation_tokens"] == (7, 8)
    assert adapter.metadata["general.tags"] == tuple(words)
    assert adapter.metadata["some.floats"] == (0.5, -2.0)
    assert adapter.metadata["some.bytes"] == (0,) * (1 << 16)
    assert "too.long" not in adapter.metadata
    assert adapter.task_name == ""  # it is a text in llama.cpp


def test_metadata_missing(load: Any) -> None:
    """Missing keys read as empty."""
    adapter = load()
    assert (adapter.task_name, adapter.prompt_prefix, adapter.invocation_tokens) == ("", "", ())


@pytest.mark.parametrize("alpha", [16.0, 16, np.float64(16), np.int32(16), np.uint8(16)])
def test_scale_is_user_scale_times_alpha_over_rank(load: Any, alpha: Any) -> None:
    """Alpha of any number type counts; the rank is that of the target."""
    adapter = load(adapter_metadata(adapter__lora__alpha=alpha))
    assert adapter.alpha == 16
    assert adapter.effective_scale(Q, 0.5) == 2.0  # rank 4
    assert adapter.effective_scale("blk.0.ffn_up.weight", 0.5) == 1.0  # rank 8
    assert adapter.pairs[Q].scale == 4.0


@pytest.mark.parametrize("alpha", [None, 0.0, -0.0, np.float64(1e-60)])
def test_alpha_missing_or_zero(load: Any, alpha: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without alpha the user scale applies as it is, and a warning says so."""
    with caplog.at_level(logging.WARNING):
        adapter = load(adapter_metadata(adapter__lora__alpha=alpha))
    assert adapter.effective_scale(Q, 0.3) == float(np.float32(0.3))
    assert any("not divided by the rank" in warning for warning in adapter.report.warnings)
    assert "not divided by the rank" in caplog.text


def test_negative_alpha_subtracts(load: Any) -> None:
    """A negative alpha is computed as llama.cpp computes it, with a warning."""
    adapter = load(adapter_metadata(adapter__lora__alpha=-8.0))
    assert adapter.effective_scale(Q, 1.0) == -2.0
    assert any("negative" in warning for warning in adapter.report.warnings)


def test_scale_is_rounded_as_f32(load: Any) -> None:
    """The product is formed in f32, left to right, like llama.cpp's."""
    adapter = load(adapter_metadata(adapter__lora__alpha=0.7))
    expected = np.float32(0.1) * np.float32(0.7) / np.float32(4)
    assert adapter.effective_scale(Q, 0.1) == float(expected)


def test_scale_that_overflows_is_refused(load: Any) -> None:
    """A scale whose product with alpha leaves f32 is the caller's error."""
    adapter = load(adapter_metadata(adapter__lora__alpha=1e30))
    with pytest.raises(InvalidRequestError, match="finite"):
        adapter.effective_scale(Q, 1e30)


def test_ignore_norm_loads_without_norm_weights(load: Any) -> None:
    """With ignore_norm the norm weights are left out, with a warning, and do not count."""
    norm = {"blk.0.attn_norm.weight": tensor(np.ones(N_EMBD))}
    adapter = load(None, good_tensors() | norm, ignore_norm=True)
    assert adapter.report.ignored == ("blk.0.attn_norm.weight",)
    assert any("left out as asked: 1 norm weights" in w for w in adapter.report.warnings)
    assert adapter.digest == load().digest


def test_some_pairs_of_zeros_are_a_warning(load: Any) -> None:
    """A pair of zeros in an adapter that does something is only reported."""
    zero = {f"{Q}.lora_b": tensor(np.zeros((N_EMBD, 4)))}
    adapter = load(None, good_tensors() | zero)
    assert any("1 of 2 pairs are all zeros" in warning for warning in adapter.report.warnings)


def test_rank_above_the_sizes_is_a_warning(load: Any) -> None:
    """A rank that no low-rank part needs is legal and reported."""
    adapter = load(None, pair(Q, rank=N_EMBD + 1))
    assert any("rank above" in warning for warning in adapter.report.warnings)


def test_repacked_base_is_one_warning(lib: Library, tmp_path: Path) -> None:
    """The repack buffers of the base are mentioned once an adapter."""
    shapes = {name: target.ne for name, target in base().targets.items()}
    repacked = base_info("llama", "tiny", shapes, repacked=set(shapes))
    adapter = read_adapter(lib, write(tmp_path / "a.gguf"), repacked)
    assert [w for w in adapter.report.warnings if "repack" in w] == [
        f"lora for '{min(adapter.pairs)}' and {len(adapter.pairs) - 1} more cannot use buft of the "
        "base's repacked weights, fallback to CPU: they stay in plain memory"
    ]


@pytest.mark.parametrize(
    ("key", "option", "tied", "expected", "warns"),
    [
        (None, None, True, True, True),
        (True, None, True, True, False),
        (False, None, True, False, False),
        (None, False, True, False, False),
        (None, True, True, True, False),
        (True, False, True, False, False),
        (False, True, True, True, False),
        (True, None, False, False, False),
        (None, None, False, False, False),
        (None, True, False, False, True),
    ],
)
def test_tied_output(
    load: Any, key: bool | None, option: bool | None, tied: bool, expected: bool, warns: bool
) -> None:
    """The option wins over the file's key, the key over the default (both, with a warning)."""
    metadata = adapter_metadata(loragraph__adapter__tied_output=key)
    tensors = pair(EMBD, n_out=N_VOCAB)
    adapter = load(metadata, tensors, tied=tied, tied_output=option)
    assert adapter.tied_output is expected
    assert any("tied" in warning for warning in adapter.report.warnings) is warns


def test_output_on_a_tied_base_changes_the_head_alone(load: Any) -> None:
    """A tied base takes output.weight pairs; beside one the token table keeps to the lookup."""
    head = pair(OUT, n_out=N_VOCAB)
    adapter = load(None, head, tied=True)
    assert list(adapter.pairs) == [OUT]
    assert not adapter.tied_output
    assert not load(None, head | pair(EMBD, n_out=N_VOCAB), tied=True).tied_output


@pytest.mark.parametrize("by_key", [True, False])
def test_two_pairs_for_one_head_are_refused(load: Any, by_key: bool) -> None:
    """tied_output together with a pair for the head contradicts itself."""
    metadata = adapter_metadata(loragraph__adapter__tied_output=by_key or None)
    tensors = pair(OUT, n_out=N_VOCAB) | pair(EMBD, n_out=N_VOCAB)
    with pytest.raises(AdapterFormatError, match="has a pair of its own"):
        load(metadata, tensors, tied=True, tied_output=None if by_key else True)


def test_report(load: Any) -> None:
    """The report counts tensors, targets by kind, ranks, scales, bytes and the base's share."""
    adapter = load()
    report = adapter.report.to_dict()
    assert report["coverage"]["attn_q"] == {"changed": 1, "in_base": 1}
    assert report["coverage"]["ffn_up_exps"] == {"changed": 0, "in_base": 1}
    assert "attn_norm" not in report["coverage"]
    assert (report["n_tensors"], report["n_targets"]) == (4, 2)
    assert (report["rank_min"], report["rank_max"]) == (4, 8)
    assert report["scales"] == {Q: 4.0, "blk.0.ffn_up.weight": 2.0}
    n_params = 4 * (N_EMBD + N_EMBD) + 8 * (N_EMBD + N_FF)
    assert report["n_params"] == n_params
    assert report["base_share"] == n_params / base().n_params
    assert report["nbytes"] == 4 * n_params
    assert report["warnings"] == []


def test_tied_head_counts_once(lib: Library) -> None:
    """The parameters of a tied base do not count the head that it does not have."""
    assert base(tied=False).n_params - base(tied=True).n_params == N_EMBD * N_VOCAB


def test_without_base_only_the_file_is_checked(lib: Library, tmp_path: Path) -> None:
    """A tool may read an adapter without a base."""
    path = write(tmp_path / "a.gguf", None, pair("blk.77.attn_q.weight"))
    assert check_adapter(lib, path) == []
    adapter = read_adapter(lib, path, None)
    assert adapter.report.base_share == 0
    assert adapter.report.coverage == {"attn_q": (1, 0)}


@pytest.mark.parametrize("type_", [F32, F16, BF16, Q8_0], ids=lambda t: t.name)
def test_one_value_is_enough(load: Any, type_: Any) -> None:
    """An adapter whose B has a single value other than 0 changes something."""
    b = np.zeros((N_EMBD, 32), np.float32)
    b[-1, -1] = 1.0
    adapter = load(None, pair(Q, rank=32) | {f"{Q}.lora_b": tensor(b, type_)})
    assert adapter.report.warnings == ()
    with pytest.raises(AdapterFormatError, match="would change nothing"):
        load(None, pair(Q, rank=32) | {f"{Q}.lora_b": tensor(0 * b, type_)})
