"""Merged weights compute what the adapters compute at run time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.numerics.compare import nmse
from tests.oracle.libllama import Libllama
from tests.reference.adapter import read_metadata
from tests.reference.llama import Active, ReferenceLlama
from tests.reference.merge import merge
from tests.tiny import TinyAdapter, TinyLlama

TOKENS: list[int] = np.random.default_rng(4).integers(3, 320, 40).tolist()

# Merged weights are rounded to float32 once (measured 1e-14), libllama adds its own (2e-13).
ROUNDING_NMSE, LIBLLAMA_NMSE = 1e-13, 2e-12


@pytest.mark.parametrize("tied_output", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("output", [True, False])
def test_run_time_equals_merged(
    tied: bool, output: bool, tied_output: bool, tmp_path: Path
) -> None:
    """Two scaled adapters with table and head, on tied and untied bases with scale tensors."""
    model = TinyLlama(tied=tied, scales=True, ffn_bias=True)
    base = model.write(tmp_path / "m.gguf")
    first = TinyAdapter(embeddings=True, output=output).arrays(model)
    second = TinyAdapter(targets=("attn_v", "ffn_up"), alpha=None, seed=7).arrays(model)
    adapters = [(first, 0.5), (second, -1.0)]
    run_time: list[Active] = [*adapters]
    expected = ReferenceLlama.load(base).logits(TOKENS, run_time, tied_output=tied_output)
    path = merge(base, adapters, tmp_path / "merged.gguf", tied_output=tied_output)
    assert nmse(ReferenceLlama.load(path).logits(TOKENS), expected) <= ROUNDING_NMSE
    with Libllama(path, kv_type="f32") as oracle:
        assert nmse(oracle.logits(TOKENS), expected) <= LIBLLAMA_NMSE


def test_tied_output_matters_on_a_tied_base_only(tmp_path: Path) -> None:
    """The option changes the head of a tied base and nothing of an untied one."""
    for tied in (True, False):
        model = TinyLlama(tied=tied)
        reference = ReferenceLlama.load(model.write(tmp_path / "m.gguf"))
        active: list[Active] = [(TinyAdapter(embeddings=True).arrays(model), 1.0)]
        both = reference.logits(TOKENS, active, tied_output=True)
        lookup = reference.logits(TOKENS, active, tied_output=False)
        assert (nmse(lookup, both) > 1e-3) is tied


def test_metadata_is_kept(tmp_path: Path) -> None:
    """A merged split model is one file with the base's keys, without those of the split."""
    model = TinyLlama()
    path = merge(model.write_split(tmp_path, 2), [], tmp_path / "merged.gguf")
    expected = read_metadata(model.write(tmp_path / "m.gguf"))
    assert read_metadata(path) == expected
