"""Adapter files combined into one: the same deltas, loadable by llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFReader

from loragraph.errors import (
    AdapterMismatchError,
    ConfigError,
    InvalidRequestError,
    LoragraphError,
)
from loragraph.tools.combine import combine_files
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, libllama_logits, loragraph_logits, random_tokens
from tests.reference.adapter import read_adapter
from tests.tiny import TinyAdapter, TinyLlama


@pytest.mark.parametrize(
    ("adapters", "scales"),
    [
        ([TinyAdapter(rank=2), TinyAdapter(rank=5, seed=2)], [0.7, 0.3]),
        ([TinyAdapter(targets=("attn_q",), rank=3), TinyAdapter(seed=2, alpha=None)], [1.0, -0.5]),
        (
            [
                TinyAdapter(rank=32, dtype=GGMLType.Q8_0, targets=("attn_q",)),
                TinyAdapter(rank={"attn_q": 1, "ffn_up": 7}, dtype=GGMLType.F16, seed=2),
                TinyAdapter(embeddings=True, output=True, seed=3),
            ],
            [0.5, 1.5, 0.25],
        ),
        ([TinyAdapter()], [1.0]),
    ],
    ids=["ranks", "disjoint", "three types", "one"],
)
def test_the_file_is_the_sum_of_deltas(
    adapters: list[TinyAdapter], scales: list[float], tmp_path: Path
) -> None:
    """Every target's change is the sum of the scaled changes, to f32 rounding, for any ranks."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    paths = [tmp_path / f"{i}.gguf" for i in range(len(adapters))]
    meant = [a.write(path, model) for a, path in zip(adapters, paths, strict=True)]
    report = combine_files(
        zip(paths, scales, strict=True), tmp_path / "c.gguf", base=base, outtype="f32"
    )
    result = read_adapter(tmp_path / "c.gguf")
    assert result.pairs.keys() == {name for arrays in meant for name in arrays.pairs}
    for name, (_, b) in result.pairs.items():
        parts = [
            arrays.delta(name, scale)
            for arrays, scale in zip(meant, scales, strict=True)
            if name in arrays.pairs
        ]
        assert nmse(result.delta(name), np.sum(parts, axis=0)) < 1e-13
        ranks = sum(arrays.pairs[name][1].shape[1] for arrays in meant if name in arrays.pairs)
        assert report.ranks[name] == b.shape[1] == ranks


def test_libllama_loads_it_and_agrees(tmp_path: Path) -> None:
    """llama.cpp on the combined file computes what it does on both adapters at once."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path, adapter in zip(paths, (TinyAdapter(), TinyAdapter(rank=6, seed=2)), strict=True):
        adapter.write(path, model)
    combine_files({paths[0]: 0.7, paths[1]: 0.3}, tmp_path / "c.gguf")
    tokens = random_tokens(16)
    two = libllama_logits(base, paths, [(0.7, 0.3)], tokens)[(0.7, 0.3)]
    one = libllama_logits(base, [tmp_path / "c.gguf"], [(1.0,)], tokens)[(1.0,)]
    ours = loragraph_logits(base, [tmp_path / "c.gguf"], [(1.0,)], tokens, EXACT)[(1.0,)]
    assert nmse(one, two) < 1e-10
    assert nmse(ours, two) < 1e-10


def test_keys_record_what_was_combined(tmp_path: Path) -> None:
    """Names, digests, scales, invocation tokens and the tied head's fact are in the file."""
    model = TinyLlama(tied=True)
    base = model.write(tmp_path / "base.gguf")
    keys = {"loragraph.adapter.tied_output": False}
    for seed, name in enumerate("ab"):
        TinyAdapter(seed=seed, embeddings=True, invocation_tokens=[7, 8], metadata=keys).write(
            tmp_path / name, model
        )
    for given in (None, base):
        combine_files({tmp_path / "a": 1, tmp_path / "b": 2}, tmp_path / "c.gguf", base=given)
        fields = GGUFReader(tmp_path / "c.gguf", "r").fields
        assert fields["loragraph.combine.names"].contents() == ["a", "b"]
        assert fields["loragraph.combine.scales"].contents() == [1.0, 2.0]
        assert fields["adapter.alora.invocation_tokens"].contents() == [7, 8]
        assert fields["loragraph.adapter.tied_output"].contents() is False


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "phrase"),
    [
        (
            TinyAdapter(invocation_tokens=[5]),
            TinyAdapter(seed=2),
            {},
            InvalidRequestError,
            "invocation tokens",
        ),
        (
            TinyAdapter(metadata={"general.architecture": "qwen2"}),
            TinyAdapter(seed=2),
            {},
            AdapterMismatchError,
            "architecture 'qwen2'",
        ),
        (
            TinyAdapter(embeddings=True, metadata={"loragraph.adapter.tied_output": True}),
            TinyAdapter(embeddings=True, seed=2),
            {},
            ConfigError,
            "agree on loragraph.adapter.tied_output",
        ),
        (TinyAdapter(), TinyAdapter(seed=2), {"outtype": "q4_0"}, ConfigError, "f32, f16"),
        (
            TinyAdapter(b_std=1e5),
            TinyAdapter(seed=2),
            {"outtype": "f16"},
            InvalidRequestError,
            "within",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    a: TinyAdapter,
    b: TinyAdapter,
    options: dict[str, Any],
    error: type[LoragraphError],
    phrase: str,
    tmp_path: Path,
) -> None:
    """The reason is named, and no file is written."""
    for name, adapter in (("a", a), ("b", b)):
        adapter.write(tmp_path / name, TinyLlama())
    with pytest.raises(error, match=phrase):
        combine_files({tmp_path / "a": 1, tmp_path / "b": 1}, tmp_path / "c.gguf", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_adapters_of_unlike_bases_are_refused(tmp_path: Path) -> None:
    """Sizes of a shared target differ."""
    TinyAdapter().write(tmp_path / "a", TinyLlama())
    TinyAdapter().write(tmp_path / "b", TinyLlama(n_embd=128))
    with pytest.raises(AdapterMismatchError, match="unlike base models"):
        combine_files({tmp_path / "a": 1, tmp_path / "b": 1}, tmp_path / "c.gguf")
    with pytest.raises(ConfigError, match="another file than the input"):
        combine_files({tmp_path / "a": 1}, tmp_path / "a")


@pytest.mark.parametrize(("outtype", "bound"), [("f16", 1e-6), ("bf16", 1e-4), ("q8_0", 5e-4)])
def test_types_of_the_tensors(outtype: str, bound: float, tmp_path: Path) -> None:
    """Smaller types round; where rows do not fit the blocks, F16 is written."""
    meant = TinyAdapter(rank=6).write(tmp_path / "a.gguf", TinyLlama())
    combine_files({tmp_path / "a.gguf": 0.5}, tmp_path / "c.gguf", outtype=outtype)
    result = read_adapter(tmp_path / "c.gguf")
    assert max(nmse(result.delta(n), meant.delta(n, 0.5)) for n in meant.pairs) < bound
    types = {item.tensor_type.name for item in GGUFReader(tmp_path / "c.gguf", "r").tensors}
    assert types == ({"Q8_0", "F16"} if outtype == "q8_0" else {outtype.upper()})
