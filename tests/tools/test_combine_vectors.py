"""DoRA and biases in combined files: what a mix does at run time, or the reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.errors import UnsupportedError
from loragraph.tools.combine import combine_files
from loragraph.tools.merge import merge
from tests.gguf_bytes import tensor
from tests.graph.test_vectors import TinyDora
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, loragraph_logits, random_tokens
from tests.reference.adapter import read_tensors
from tests.tiny import TinyAdapter, TinyLlama, write_adapter_raw
from tests.tiny_fold import Folding, write_folded

TINY = TinyLlama(n_ff=64)
TOKENS = random_tokens(16)
EXACT_NMSE = 1e-11
ALL = TinyDora(TinyAdapter(seed=1, embeddings=True, output=True))
SOME = TinyDora(TinyAdapter(seed=2, rank=7, targets=("attn_q", "ffn_down"), alpha=5.0))
OTHERS = TinyDora(TinyAdapter(seed=4, rank=3, targets=("attn_v", "ffn_up"), output=True))
PLAIN = TinyAdapter(seed=3, rank=5, targets=("attn_q", "attn_k"))
BIAS = TinyDora(TinyAdapter(seed=5, targets=("attn_v", "attn_k")), bias=True)
BIAS_TOO = TinyDora(TinyAdapter(seed=6, rank=2, alpha=None, targets=("attn_v",)), bias=True)

Adapters = Sequence[TinyDora | TinyAdapter]


def write(folder: Path, adapters: Adapters, tiny: TinyLlama = TINY) -> tuple[Path, list[Path]]:
    """A base and adapters for it."""
    paths = [folder / f"{i}.gguf" for i in range(len(adapters))]
    for path, adapter in zip(paths, adapters, strict=True):
        adapter.write(path, tiny)
    return tiny.write(folder / "base.gguf"), paths


def assert_same(base: Path, paths: Sequence[Path], scales: Sequence[float], file: Path) -> None:
    """The file at scale u does what the mix does at u times its scales."""
    for user in (1.0, 0.5, -2.0):
        mixed = tuple(user * scale for scale in scales)
        expected = loragraph_logits(base, paths, [mixed], TOKENS, EXACT)[mixed]
        actual = loragraph_logits(base, [file], [(user,)], TOKENS, EXACT)[(user,)]
        assert nmse(actual, expected) <= EXACT_NMSE


@pytest.mark.parametrize(
    ("adapters", "scales"),
    [
        ([ALL], [1.0]),
        ([SOME, OTHERS], [1.0, 1.0]),
        ([OTHERS, PLAIN], [1.0, -0.7]),
        ([BIAS, BIAS_TOO], [0.7, -0.3]),
        ([SOME, BIAS], [1.0, 0.5]),
    ],
    ids=["alone", "disjoint", "beside plain ones", "biases", "both"],
)
@pytest.mark.parametrize("with_base", [False, True])
def test_what_is_alone_on_its_targets_is_carried(
    adapters: Adapters, scales: Sequence[float], with_base: bool, tmp_path: Path
) -> None:
    """Without the base too; biases add up with their scales. Magnitudes are the same bytes."""
    base, paths = write(tmp_path, adapters)
    out = tmp_path / "c.gguf"
    combine_files(zip(paths, scales, strict=True), out, base=base if with_base else None)
    assert_same(base, paths, scales, out)
    written = read_tensors(out)
    for path in paths:
        for name, values in read_tensors(path).items():
            if name.endswith(".lora_magnitude"):
                np.testing.assert_array_equal(written[name], values)


def test_carried_magnitudes_fit_any_quantisation_of_the_base(tmp_path: Path) -> None:
    """The lengths are taken at load, so one file serves the base in every type."""
    _, paths = write(tmp_path, [SOME, OTHERS])
    combine_files(dict.fromkeys(paths, 1.0), tmp_path / "c.gguf")
    base = replace(TINY, weight_type=GGMLType.Q8_0).write(tmp_path / "q8.gguf")
    merge(base, dict.fromkeys(paths, 1.0), tmp_path / "mixed.gguf", type="f32")
    merge(base, {tmp_path / "c.gguf": 1.0}, tmp_path / "combined.gguf", type="f32")
    mixed, combined = (read_tensors(tmp_path / f"{n}.gguf") for n in ("mixed", "combined"))
    assert max(nmse(combined[name], mixed[name]) for name in mixed) <= 1e-12


@pytest.mark.parametrize(
    ("adapters", "scales"),
    [
        ([ALL], [0.5]),
        ([ALL, SOME], [1.0, 1.0]),
        ([ALL, SOME, PLAIN], [0.3, -0.7, 1.5]),
        ([SOME, PLAIN, BIAS], [1.0, 1.0, 2.0]),
    ],
    ids=["another scale", "two", "all", "with a bias"],
)
@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q8_0], ids=lambda type_: type_.name)
def test_several_on_one_target_become_one_of_that_base(
    adapters: Adapters, scales: Sequence[float], type_: GGMLType, tmp_path: Path
) -> None:
    """With the base their sum is one DoRA: the same change, to f32 rounding."""
    base, paths = write(tmp_path, adapters, replace(TINY, weight_type=type_))
    combine_files(zip(paths, scales, strict=True), tmp_path / "c.gguf", base=base)
    if type_ == GGMLType.F32:  # others round activations, at other places after the least change
        assert_same(base, paths, scales, tmp_path / "c.gguf")
    merge(base, zip(paths, scales, strict=True), tmp_path / "mixed.gguf", type="f32")
    merge(base, {tmp_path / "c.gguf": 1.0}, tmp_path / "combined.gguf", type="f32")
    mixed, combined = (read_tensors(tmp_path / f"{n}.gguf") for n in ("mixed", "combined"))
    assert mixed.keys() == combined.keys()
    assert max(nmse(combined[name], mixed[name]) for name in mixed) <= 1e-12


def test_any_part_names_a_split_base(tmp_path: Path) -> None:
    """The weights are found in the parts that hold them."""
    base, paths = write(tmp_path, [ALL, SOME])
    scales = dict(zip(paths, (0.3, -0.7), strict=True))
    combine_files(scales, tmp_path / "whole.gguf", base=base)
    for part in TINY.write_split(tmp_path, 3):
        combine_files(scales, tmp_path / "c.gguf", base=part)
        assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize(
    ("adapters", "scales"),
    [([SOME], [0.5]), ([ALL, SOME], [1.0, 1.0]), ([SOME, PLAIN], [1.0, 1.0])],
    ids=["another scale", "two", "beside a plain pair"],
)
def test_without_the_base_several_on_one_target_are_refused(
    adapters: Adapters, scales: Sequence[float], tmp_path: Path
) -> None:
    """The reason and the ways out are named, and no file is written."""
    _, paths = write(tmp_path, adapters)
    with pytest.raises(UnsupportedError, match="alone on its target") as caught:
        combine_files(zip(paths, scales, strict=True), tmp_path / "c.gguf")
    assert "give the base" in str(caught.value)
    assert not (tmp_path / "c.gguf").exists()


def test_a_row_that_is_multiplied_by_zero_is_refused(tmp_path: Path) -> None:
    """m = 0 takes a row of W away; what a plain adapter adds to it cannot be stated as DoRA."""
    base, paths = write(tmp_path, [SOME, PLAIN])
    keys, tensors = SOME.pairs.keys(), []
    for name, values in read_tensors(paths[0]).items():
        if name == "blk.0.attn_q.weight.lora_magnitude":
            values[3] = 0
        tensors.append(tensor(name, values))
    write_adapter_raw(paths[0], keys, tensors)
    with pytest.raises(UnsupportedError, match="multiplied by exactly 0"):
        combine_files(dict.fromkeys(paths, 1.0), tmp_path / "c.gguf", base=base)


def test_a_folded_base_is_refused(tmp_path: Path) -> None:
    """Rotated rows have other lengths once B A is added."""
    _, paths = write(tmp_path, [SOME])
    base = write_folded(TINY, Folding(), tmp_path / "folded.gguf")
    with pytest.raises(UnsupportedError, match="Hadamard-folded"):
        combine_files({paths[0]: 0.5}, tmp_path / "c.gguf", base=base)
