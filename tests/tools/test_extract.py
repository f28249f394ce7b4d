"""An adapter from two models: exact at full rank, best below, and nothing dropped in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.errors import AdapterMismatchError, ConfigError, GGUFError
from loragraph.tools.extract import extract
from loragraph.tools.merge import merge
from loragraph.tools.svd import Floats, truncated_svd
from tests.gguf_bytes import gguf_bytes, tensor
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, libllama_logits, loragraph_logits, random_tokens
from tests.reference.adapter import read_adapter, read_tensors
from tests.reference.svd import truncated
from tests.tiny import TinyAdapter, TinyLlama


def tuned(folder: Path, model: TinyLlama, std: float = 0.05) -> Path:
    """`model` with every matrix changed at full rank."""
    rng = np.random.default_rng(7)
    tensors = [
        tensor(
            name,
            array
            if array.ndim == 1
            else array + std * array.std() * rng.standard_normal(array.shape, np.float32),
        )
        for name, array in model.arrays.items()
    ]
    path = folder / "tuned.gguf"
    path.write_bytes(gguf_bytes(model.metadata(), tensors))
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_full_rank_reproduces_the_tuned_model(tied: bool, tmp_path: Path) -> None:
    """Base and adapter are the tuned model: weights after a merge, logits at run time."""
    model = TinyLlama(tied=tied)
    base, new = model.write(tmp_path / "base.gguf"), tuned(tmp_path, model)
    report = extract(new, base, tmp_path / "a.gguf", rank=64)
    assert all(choice.energy > 1 - 1e-9 for choice in report.choices)
    assert len(report.choices) == len(model.matrices())
    merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "merged.gguf")
    merged, expected = read_tensors(tmp_path / "merged.gguf"), read_tensors(new)
    assert merged.keys() == expected.keys()
    assert max(nmse(merged[name], expected[name]) for name in expected) < 1e-12
    tokens = random_tokens(16)
    logits = loragraph_logits(base, [tmp_path / "a.gguf"], [(1.0,)], tokens, EXACT)[(1.0,)]
    assert nmse(logits, libllama_logits(new, [], [()], tokens)[()]) < 1e-9


def test_split_models(tmp_path: Path) -> None:
    """Of split models the first parts are named; the adapter is the one of whole models."""
    model = TinyLlama(n_layer=1)
    new = TinyLlama(n_layer=1, seed=model.seed + 1)
    whole = [one.write(tmp_path / f"{one.seed}.gguf") for one in (new, model)]
    parts = [one.write_split(tmp_path, 3, stem=f"split{one.seed}")[0] for one in (new, model)]
    extract(whole[0], whole[1], tmp_path / "a.gguf", rank=4)
    extract(parts[0], parts[1], tmp_path / "b.gguf", rank=4)
    expected, actual = (read_tensors(tmp_path / f"{name}.gguf") for name in "ab")
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values)


def test_a_smaller_rank_is_the_best_of_it(tmp_path: Path) -> None:
    """Each pair is the naive truncation, and the energies are those of the naive one."""
    model = TinyLlama(n_layer=1)
    base, new = model.write(tmp_path / "base.gguf"), tuned(tmp_path, model)
    report = extract(new, base, tmp_path / "a.gguf", rank=5)
    result = read_adapter(tmp_path / "a.gguf")
    before, after = read_tensors(base), read_tensors(new)
    for choice in report.choices:
        difference = after[choice.target].astype(np.float64) - before[choice.target]
        best, error = truncated(difference, 5)
        assert nmse(result.delta(choice.target), best) < 1e-9
        assert choice.error == pytest.approx(error, rel=1e-5)
        relative = np.linalg.norm(difference) / np.linalg.norm(before[choice.target])
        assert report.changes[choice.target] == pytest.approx(relative, rel=1e-5)


def test_what_a_merge_put_in_comes_out_again(tmp_path: Path) -> None:
    """The adapter of a merged model has the ranks and the change of what was merged."""
    model = TinyLlama(scales=True)
    adapter = TinyAdapter(rank=3, targets=("attn_q", "ffn_down"))
    base = model.write(tmp_path / "base.gguf")
    meant = adapter.write(tmp_path / "a.gguf", model)
    merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "merged.gguf")
    report = extract(tmp_path / "merged.gguf", base, tmp_path / "b.gguf", rank=3)
    result = read_adapter(tmp_path / "b.gguf")
    assert result.pairs.keys() == meant.pairs.keys()
    for name in meant.pairs:
        assert nmse(result.delta(name), meant.delta(name)) < 1e-10
    assert all(choice.energy > 1 - 1e-8 for choice in report.choices)


def test_norms_and_biases_that_differ_are_reported(tmp_path: Path) -> None:
    """They are named with the size of their change, in the report and in a warning."""
    model = TinyLlama(attn_bias=True)
    base = model.write(tmp_path / "base.gguf")
    arrays = dict(model.arrays)
    arrays["blk.0.attn_norm.weight"] = arrays["blk.0.attn_norm.weight"] * 1.5
    arrays["blk.1.attn_q.bias"] = arrays["blk.1.attn_q.bias"] + 0.01
    tensors = [tensor(name, array) for name, array in arrays.items()]
    (tmp_path / "t.gguf").write_bytes(gguf_bytes(model.metadata(), tensors))
    with pytest.raises(ConfigError, match=r"equal ones \(2 other tensors differ\)"):
        extract(tmp_path / "t.gguf", base, tmp_path / "a.gguf", rank=4)
    arrays["blk.0.attn_q.weight"] = arrays["blk.0.attn_q.weight"] * 1.01
    tensors = [tensor(name, array) for name, array in arrays.items()]
    (tmp_path / "t.gguf").write_bytes(gguf_bytes(model.metadata(), tensors))
    report = extract(tmp_path / "t.gguf", base, tmp_path / "a.gguf", rank=4)
    assert {left.name for left in report.left} == {"blk.0.attn_norm.weight", "blk.1.attn_q.bias"}
    assert report.left[0].change == pytest.approx(0.5, rel=1e-5)
    assert "attn_norm.weight (by 50.00%)" in report.warnings[0]


def test_tied_and_untied_models(tmp_path: Path) -> None:
    """A head that one model has apart becomes a pair of its own; the lookup is left alone."""
    model = TinyLlama(tied=True)
    base = model.write(tmp_path / "base.gguf")
    TinyAdapter(output=True, targets=()).write(tmp_path / "head.gguf", model)
    merge(base, {tmp_path / "head.gguf": 1.0}, tmp_path / "untied.gguf")
    report = extract(tmp_path / "untied.gguf", base, tmp_path / "a.gguf", rank=4)
    assert [choice.target for choice in report.choices] == ["output.weight"]
    merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "again.gguf")
    first, second = (read_tensors(tmp_path / name) for name in ("untied.gguf", "again.gguf"))
    assert max(nmse(second[name], first[name]) for name in first) < 1e-11


def test_models_that_do_not_belong_together(tmp_path: Path) -> None:
    """Unlike architectures, tensors or sizes, and values that are not finite, are named."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    out = tmp_path / "a.gguf"
    for other, phrase in (
        (replace(model, extra={"general.architecture": "qwen2"}), "architecture 'llama'"),
        (replace(model, n_layer=3), r"only the tuned model has this tensor"),
        (replace(model, n_vocab=330), "was the vocabulary extended"),
    ):
        with pytest.raises(AdapterMismatchError, match=phrase):
            extract(other.write(tmp_path / "other.gguf"), base, out, rank=2)
    broken = [
        tensor(name, np.where(array > 1, np.inf, array)) for name, array in model.arrays.items()
    ]
    (tmp_path / "broken.gguf").write_bytes(gguf_bytes(model.metadata(), broken))
    with pytest.raises(GGUFError, match="finite"):
        extract(tmp_path / "broken.gguf", base, out, rank=2)
    with pytest.raises(ConfigError, match="rank"):
        extract(base, base, out, rank=5000)
    with pytest.raises(ConfigError, match="another file than the input"):
        extract(tmp_path / "other.gguf", base, base, rank=2)
    assert not out.exists()


def test_unlike_types_are_warned_about(tmp_path: Path) -> None:
    """The rounding of a quantised model is part of the difference, and is said to be."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    other = replace(model, weight_type=GGMLType.Q8_0).write(tmp_path / "q.gguf")
    report = extract(other, base, tmp_path / "a.gguf", rank=2)
    assert "unlike types" in report.warnings[0]
    assert all(choice.energy < 0.5 for choice in report.choices)  # noise has no low rank


def test_large_matrices_by_subspace_iteration() -> None:
    """The directions found hold as much as the exact ones, and what is said of them is true."""
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((900, 40)), rng.standard_normal((40, 1000))
    matrix = (u * np.geomspace(1, 1e-2, 40)) @ v + 0.01 * rng.standard_normal((900, 1000))
    single: Floats = matrix.astype(np.float32)
    found, exact = truncated_svd(single, 16), truncated_svd(single, 16, exact=True)
    assert found.captured(16) == pytest.approx(exact.captured(16), rel=1e-6)
    left, right = found.factors(16)
    error = np.linalg.norm(single - left @ right) / np.linalg.norm(single)
    assert 1 - error**2 == pytest.approx(found.captured(16), rel=1e-5)
    same = truncated_svd(single, 16)
    assert np.array_equal(same.u, found.u)
