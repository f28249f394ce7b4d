"""Merging adapters into a base: equal to the naive merge, and all else byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFReader

from loragraph.errors import (
    AdapterMismatchError,
    ConfigError,
    GGUFError,
    LoragraphError,
    OutputError,
    UnsupportedError,
)
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import load_library
from loragraph.tools.extract import extract
from loragraph.tools.gguf_header import read_header
from loragraph.tools.merge import merge
from tests.gguf_bytes import Value, gguf_bytes, quantised, tensor
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, libllama_logits, loragraph_logits, random_tokens
from tests.reference.adapter import dequantised, read_tensors
from tests.reference.merge import merged
from tests.tiny import TinyAdapter, TinyLlama
from tests.tiny_fold import Folding, write_folded


def write(folder: Path, model: TinyLlama, *adapters: TinyAdapter) -> tuple[Path, list[Path]]:
    """The files of a base and of adapters for it."""
    base = model.write(folder / "base.gguf")
    paths = [folder / f"a{i}.gguf" for i in range(len(adapters))]
    for path, adapter in zip(paths, adapters, strict=True):
        adapter.write(path, model)
    return base, paths


def raw_tensors(path: Path) -> dict[str, bytes]:
    """Bytes of each tensor of a file."""
    return {item.name: item.data.tobytes() for item in GGUFReader(path, "r").tensors}


def types_of(path: Path) -> dict[str, GGMLType]:
    """Type of each tensor of a file."""
    return {item.name: item.tensor_type for item in GGUFReader(path, "r").tensors}


def keys_of(path: Path) -> Mapping[str, bytes]:
    """Keys of a file as bytes."""
    with GGUFFile(load_library(), path) as file:
        return read_header(file).keys


@pytest.mark.parametrize(
    ("model", "adapters", "scales", "tied_output"),
    [
        (TinyLlama(), [TinyAdapter()], [1.0], None),
        (TinyLlama(), [TinyAdapter(rank=3), TinyAdapter(rank=7, seed=2)], [0.7, -0.4], None),
        (
            TinyLlama(),
            [TinyAdapter(targets=("attn_q",)), TinyAdapter(targets=("ffn_up",), seed=2)],
            [1.0, 0.5],
            None,
        ),
        (TinyLlama(), [TinyAdapter(embeddings=True, output=True, alpha=None)], [0.5], None),
        (TinyLlama(scales=True), [TinyAdapter()], [1.0], None),
        (TinyLlama(tied=True), [TinyAdapter(embeddings=True)], [1.0], True),
        (TinyLlama(tied=True), [TinyAdapter(embeddings=True)], [1.0], False),
        (TinyLlama(tied=True), [TinyAdapter(output=True)], [1.0], None),
        (TinyLlama(), [TinyAdapter(rank=32, dtype=GGMLType.Q8_0)], [1.0], None),
        (TinyLlama(), [TinyAdapter(dtype=GGMLType.BF16)], [1.0], None),
    ],
    ids=[
        *("one", "two", "disjoint", "table and head", "weight factors", "tied both"),
        *("tied lookup alone", "tied head alone", "quantised adapter", "BF16 adapter"),
    ],
)
def test_merge_equals_the_naive_merge(
    model: TinyLlama,
    adapters: Sequence[TinyAdapter],
    scales: Sequence[float],
    tied_output: bool | None,
    tmp_path: Path,
) -> None:
    """On an F32 base every tensor is W + sum s B A, to f32 rounding."""
    base, paths = write(tmp_path, model, *adapters)
    merge(base, zip(paths, scales, strict=True), tmp_path / "out.gguf", tied_output=tied_output)
    meant = [
        (adapter.arrays(model), scale) for adapter, scale in zip(adapters, scales, strict=True)
    ]
    expected = merged(read_tensors(base), meant, tied_output=tied_output is not False)
    actual = read_tensors(tmp_path / "out.gguf")
    for name in [name for name in actual if name.endswith(".scale")]:
        actual[name.removesuffix(".scale") + ".weight"] *= actual.pop(name)
    if tied_output:  # the naive merge always unties; here both change alike and stay one tensor
        assert "output.weight" not in actual
        expected.pop("output.weight")
    assert actual.keys() == expected.keys()
    assert max(nmse(actual[name], expected[name]) for name in expected) < 1e-13


@pytest.mark.parametrize(
    "type_",
    [
        *(GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0),
        *(GGMLType.Q5_1, GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K),
        *(GGMLType.Q6_K, GGMLType.IQ4_NL, GGMLType.IQ4_XS, GGMLType.IQ3_S, GGMLType.IQ2_XXS),
        *(GGMLType.MXFP4, GGMLType.TQ2_0),
    ],
    ids=lambda type_: type_.name,
)
def test_keep_stores_each_tensor_in_its_own_type(type_: GGMLType, tmp_path: Path) -> None:
    """Any base type: a merged tensor is what that type makes of the exact sum."""
    model = TinyLlama(  # K-quants need rows of 256
        n_embd=256,
        n_ff=256,
        n_head_kv=4,
        n_layer=1,
        types=dict.fromkeys(("attn_q", "attn_k", "ffn_down"), type_),
    )
    adapter = TinyAdapter(targets=("attn_q", "ffn_down"))
    base, paths = write(tmp_path, model, adapter)
    report = merge(base, {paths[0]: 1.0}, tmp_path / "out.gguf")
    assert types_of(tmp_path / "out.gguf") == types_of(base)
    low = type_ is GGMLType.IQ2_XXS
    assert any("importance matrix" in warning for warning in report.warnings) == low
    before, after = raw_tensors(base), raw_tensors(tmp_path / "out.gguf")
    exact = merged(read_tensors(base), [(adapter.arrays(model), 1.0)])
    for name, data in after.items():
        if name.split(".")[-2] not in (adapter.targets or ()):
            assert data == before[name]
            continue
        values = exact[name].astype(np.float32)
        naive = dequantised(quantised(values, type_), values.shape, type_)
        actual = dequantised(data, values.shape, type_)
        # The naive quantiser weighs all columns alike, ggml's own K-quants by their squares.
        assert nmse(actual, values) < 1.6 * nmse(naive, values)


def test_keys_alignment_and_untouched_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    """Only three keys are added; the alignment is kept; what no adapter touches is copied."""
    model = TinyLlama(
        extra={"general.alignment": 128, "a.list": ["x", "ü"], "a.f64": np.float64(1)}
    )
    path = tmp_path / "base.gguf"
    path.write_bytes(gguf_bytes(model.metadata(), model.raw_tensors(), alignment=128))
    TinyAdapter(targets=("attn_v",)).write(tmp_path / "a.gguf", model)
    merge(path, {tmp_path / "a.gguf": 0.5}, tmp_path / "out.gguf")
    before, after = keys_of(path), keys_of(tmp_path / "out.gguf")
    assert list(after)[: len(before)] == list(before)
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) == {
        f"loragraph.merge.{name}" for name in ("names", "digests", "scales")
    }
    reader = GGUFReader(tmp_path / "out.gguf", "r")
    assert reader.alignment == 128
    assert all(item.data_offset % 128 == 0 for item in reader.tensors)
    old, new = raw_tensors(path), raw_tensors(tmp_path / "out.gguf")
    assert {name for name in old if old[name] != new[name]} == {
        f"blk.{il}.attn_v.weight" for il in range(2)
    }
    assert list(new) == list(old)


def test_the_record_grows_with_each_merge(tmp_path: Path) -> None:
    """Names, digests and scales of a second merge stand behind those of the first."""
    base, (a, b) = write(tmp_path, TinyLlama(), TinyAdapter(), TinyAdapter(seed=2))
    merge(base, {a: 0.5}, tmp_path / "one.gguf")
    merge(tmp_path / "one.gguf", {b: 2.0}, tmp_path / "two.gguf")
    fields = GGUFReader(tmp_path / "two.gguf", "r").fields
    assert fields["loragraph.merge.names"].contents() == ["a0.gguf", "a1.gguf"]
    assert fields["loragraph.merge.scales"].contents() == [0.5, 2.0]
    digests = fields["loragraph.merge.digests"].contents()
    assert len(set(digests)) == 2
    assert all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type_", ["keep", "f16"])
def test_merged_files_load_in_libllama_and_agree_with_run_time(
    type_: str, tied: bool, tmp_path: Path
) -> None:
    """libllama on the merged file computes what the adapters do at run time."""
    model = TinyLlama(tied=tied)
    base, paths = write(tmp_path, model, TinyAdapter(), TinyAdapter(seed=2, rank=6, output=True))
    merge(base, zip(paths, (0.8, 0.5), strict=True), tmp_path / "out.gguf", type=type_)
    tokens = random_tokens(24)
    run_time = loragraph_logits(base, paths, [(0.8, 0.5)], tokens, EXACT)[(0.8, 0.5)]
    file = libllama_logits(tmp_path / "out.gguf", [], [()], tokens, EXACT)[()]
    assert nmse(file, run_time) < {"keep": 1e-9, "f16": 1e-5}[type_]
    ours = loragraph_logits(tmp_path / "out.gguf", [], [()], tokens, EXACT)[()]
    assert nmse(ours, run_time) < {"keep": 1e-9, "f16": 1e-5}[type_]


@pytest.mark.parametrize(
    "type_",
    [GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.F16],
    ids=lambda type_: type_.name,
)
def test_a_quantised_base_stays_one_that_libllama_loads(type_: GGMLType, tmp_path: Path) -> None:
    """The file has the base's types, and libllama computes with it what loragraph does."""
    model = TinyLlama(weight_type=type_)
    base, (adapter,) = write(tmp_path, model, TinyAdapter(output=True))
    merge(base, {adapter: 1.0}, tmp_path / "out.gguf")
    assert types_of(tmp_path / "out.gguf") == types_of(base)
    tokens = random_tokens(16)
    theirs, plain = (
        libllama_logits(path, [], [()], tokens, EXACT)[()] for path in (tmp_path / "out.gguf", base)
    )
    ours = loragraph_logits(tmp_path / "out.gguf", [], [()], tokens, EXACT)[()]
    assert nmse(ours, theirs) < 1e-3
    run_time = loragraph_logits(base, [adapter], [(1.0,)], tokens, EXACT)[(1.0,)]
    # Four bits round random weights by much; without the adapter it would be 1.
    assert nmse(theirs, run_time) < 0.25 * nmse(plain, run_time)


def test_split_files_in_and_out(tmp_path: Path) -> None:
    """A split base, named by any part, gives one file, or parts that libllama opens."""
    model = TinyLlama()
    whole, (adapter,) = write(tmp_path, model, TinyAdapter())
    parts = model.write_split(tmp_path, 3)
    merge(whole, {adapter: 1.0}, tmp_path / "expected.gguf")
    expected = raw_tensors(tmp_path / "expected.gguf")
    for part in reversed(parts):
        merge(part, {adapter: 1.0}, tmp_path / "one.gguf")
        assert raw_tensors(tmp_path / "one.gguf") == expected
    assert not any(key.startswith("split.") for key in keys_of(tmp_path / "one.gguf"))
    report = merge(parts[0], {adapter: 1.0}, tmp_path / "two.gguf", max_split_bytes=150_000)
    assert report.paths[0].name == f"two-00001-of-{len(report.paths):05}.gguf"
    assert len(report.paths) > 2
    joined: dict[str, bytes] = {}
    for path in report.paths:
        joined |= raw_tensors(path)
        assert sum(map(len, raw_tensors(path).values())) <= 150_000
    assert joined == expected
    tokens = random_tokens(8)
    logits = libllama_logits(report.paths[0], [], [()], tokens)[()]
    assert nmse(logits, libllama_logits(tmp_path / "one.gguf", [], [()], tokens)[()]) == 0


def test_expert_stacks(tmp_path: Path) -> None:
    """Each expert of a 3-D stack gets its own B A, divided by its own factor where it has one."""
    rng = np.random.default_rng(0)
    n_expert, n_out, n_in, rank = 3, 48, 64, 4
    w, a, b = (
        rng.standard_normal((n_expert, *shape), dtype=np.float32)
        for shape in ((n_out, n_in), (rank, n_in), (n_out, rank))
    )
    factor = rng.uniform(0.5, 2, n_expert).astype(np.float32)
    name = "blk.0.ffn_up_exps"
    keys: dict[str, Value] = {"general.architecture": "qwen3moe"}
    base, adapter = tmp_path / "base.gguf", tmp_path / "a.gguf"
    base.write_bytes(
        gguf_bytes(keys, [tensor(f"{name}.weight", w), tensor(f"{name}.scale", factor)])
    )
    meta: dict[str, Value] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
        **keys,
    }
    halves = [tensor(f"{name}.weight.lora_a", a), tensor(f"{name}.weight.lora_b", b)]
    adapter.write_bytes(gguf_bytes(meta, halves))
    merge(base, {adapter: 0.5}, tmp_path / "out.gguf")
    actual = read_tensors(tmp_path / "out.gguf")[f"{name}.weight"]
    product = factor[:, None, None] * actual.astype(np.float64)
    expected = factor[:, None, None] * w.astype(np.float64) + 0.5 * 8 / rank * (
        b.astype(np.float64) @ a.astype(np.float64)
    )
    assert nmse(product, expected) < 1e-13


def test_many_rows_and_threads_give_the_same_bytes(tmp_path: Path) -> None:
    """The number of threads, and so the pieces of rows, changes no bit."""
    model = TinyLlama(n_vocab=5000, weight_type=GGMLType.Q8_0, n_layer=1)
    base, (adapter,) = write(tmp_path, model, TinyAdapter(output=True))
    for n in (1, 7):
        merge(base, {adapter: 1.0}, tmp_path / f"{n}.gguf", n_threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "7.gguf").read_bytes()


def test_a_row_larger_than_a_piece(tmp_path: Path) -> None:
    """Rows so long that a thread's buffers do not hold one are merged all the same."""
    rng = np.random.default_rng(0)
    name, n_in = "blk.0.ffn_down.weight", 70_000  # a piece has 65,536 values here
    w, a, b = (
        rng.standard_normal(shape, dtype=np.float32) for shape in ((3, n_in), (2, n_in), (3, 2))
    )
    keys: dict[str, Value] = {"general.architecture": "llama", "llama.block_count": 1}
    base, adapter = tmp_path / "base.gguf", tmp_path / "a.gguf"
    base.write_bytes(gguf_bytes(keys, [tensor(name, w), tensor("blk.0.ffn_norm.weight", w[0])]))
    own: dict[str, Value] = {"general.type": "adapter", "adapter.type": "lora"}
    halves = [tensor(f"{name}.lora_a", a), tensor(f"{name}.lora_b", b)]
    adapter.write_bytes(gguf_bytes({**own, **keys, "adapter.lora.alpha": 2.0}, halves))
    merge(base, {adapter: 0.5}, tmp_path / "out.gguf", n_threads=64)
    merged = read_tensors(tmp_path / "out.gguf")
    expected = w + 0.5 * (b.astype(np.float64) @ a.astype(np.float64))
    assert nmse(merged[name], expected) < 1e-13
    np.testing.assert_array_equal(merged["blk.0.ffn_norm.weight"], w[0])


def test_a_base_that_fails_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file cut meanwhile, or a disk that fails: named, and nothing stands under the name."""
    base, (adapter,) = write(tmp_path, TinyLlama(), TinyAdapter())

    def broken(*_args: object) -> int:
        raise OSError(5, "Input/output error")

    for instead, phrase in ((lambda *_args: 0, "became shorter"), (broken, "Input/output error")):
        with monkeypatch.context() as patch:
            patch.setattr("loragraph.tools.merge_run.os.preadv", instead)
            with pytest.raises(GGUFError, match=phrase):
                merge(base, {adapter: 1.0}, tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a0.gguf", "base.gguf"]


def test_progress_reaches_the_whole_and_never_falls(tmp_path: Path) -> None:
    """Bytes done grow up to the total."""
    base, (adapter,) = write(tmp_path, TinyLlama(), TinyAdapter())
    seen: list[tuple[int, int]] = []
    merge(base, {adapter: 1.0}, tmp_path / "o.gguf", progress=lambda *pair: seen.append(pair))
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == sum(map(len, raw_tensors(base).values()))


@pytest.mark.parametrize(
    ("adapter", "options", "error", "phrase"),
    [
        (TinyAdapter(invocation_tokens=[5, 6]), {}, UnsupportedError, "aLoRA cannot be merged"),
        (TinyAdapter(), {"type": "q9"}, ConfigError, "expected one of keep, f32"),
        (TinyAdapter(), {"type": "iq2_xxs"}, ConfigError, "importance matrix"),
        (TinyAdapter(b_std=3e5), {"type": "f16"}, UnsupportedError, "within ±65504"),
        (TinyAdapter(layers=[0, 5]), {}, AdapterMismatchError, "wrong base model"),
    ],
)
def test_what_cannot_be_merged_says_why(
    adapter: TinyAdapter,
    options: Mapping[str, Any],
    error: type[LoragraphError],
    phrase: str,
    tmp_path: Path,
) -> None:
    """A refusal names the reason and leaves no file."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    adapter.write(tmp_path / "a.gguf", model)
    with pytest.raises(error, match=phrase):
        merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "out.gguf", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "base.gguf"]


def test_wrong_arguments(tmp_path: Path) -> None:
    """No adapter, scales that are no numbers or all 0, and outputs that are inputs or no files."""
    base, (adapter,) = write(tmp_path, TinyLlama(), TinyAdapter())
    out = tmp_path / "out.gguf"
    link = tmp_path / "link.gguf"
    link.hardlink_to(base)
    for pairs, target, phrase in (
        (dict[Path, float](), out, "at least one adapter"),
        ({adapter: 0.0}, out, "at least one adapter"),
        ({adapter: float("nan")}, out, "finite number"),
        ({adapter: 1.0}, base, "another file than the input"),
        ({adapter: 1.0}, link, "another file than the input"),
        ({adapter: 1.0}, adapter, "another file than the input"),
        ({adapter: 1.0}, tmp_path, "the folder"),
        ({adapter: 1.0}, tmp_path / "no" / "out.gguf", "does not exist"),
        ({adapter: 1.0}, Path("/dev/null"), "regular file"),
    ):
        with pytest.raises(ConfigError, match=phrase):
            merge(base, pairs, target)
    with pytest.raises(ConfigError, match="expected a base model"):
        merge(adapter, {adapter: 1.0}, out)


def test_a_part_of_the_split_output_is_not_an_input(tmp_path: Path) -> None:
    """Parts are named by their count, which shows only late; an input among them is refused too."""
    model = TinyLlama()
    parts = model.write_split(tmp_path, 2)
    TinyAdapter().write(tmp_path / "a.gguf", model)
    before = [path.read_bytes() for path in parts]
    half = sum(map(len, raw_tensors(parts[0]).values())) + 4096
    with pytest.raises(ConfigError, match="another file than the input"):
        merge(parts[0], {tmp_path / "a.gguf": 1.0}, tmp_path / "tiny.gguf", max_split_bytes=half)
    assert [path.read_bytes() for path in parts] == before


def test_non_finite_bases_are_refused_where_they_are_changed(tmp_path: Path) -> None:
    """NaN in a changed tensor is named; in an untouched one it is copied."""
    model = TinyLlama()
    array = model.arrays["blk.0.attn_q.weight"].copy()
    array[3, 5] = np.nan
    tensors = [
        tensor(raw.name, array) if raw.name == "blk.0.attn_q.weight" else raw
        for raw in model.raw_tensors()
    ]
    base = tmp_path / "base.gguf"
    base.write_bytes(gguf_bytes(model.metadata(), tensors))
    TinyAdapter(targets=("attn_q",)).write(tmp_path / "q.gguf", model)
    TinyAdapter(targets=("attn_k",)).write(tmp_path / "k.gguf", model)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.weight"):
        merge(base, {tmp_path / "q.gguf": 1.0}, tmp_path / "out.gguf")
    merge(base, {tmp_path / "k.gguf": 1.0}, tmp_path / "out.gguf")
    assert raw_tensors(tmp_path / "out.gguf")["blk.0.attn_q.weight"] == array.tobytes()


def test_truncated_inputs(tmp_path: Path) -> None:
    """A base or an adapter that is cut anywhere is refused, and nothing is written."""
    base, (adapter,) = write(tmp_path, TinyLlama(n_layer=1), TinyAdapter())
    for path in (base, adapter):
        data = path.read_bytes()
        for n in (0, 3, 24, 200, len(data) // 2, len(data) - 33):
            path.write_bytes(data[:n])
            with pytest.raises(GGUFError):
                merge(base, {adapter: 1.0}, tmp_path / "out.gguf")
        path.write_bytes(data)
    assert not (tmp_path / "out.gguf").exists()


def test_names_from_files_never_become_paths(tmp_path: Path) -> None:
    """A tensor or a model named like a path is only a name."""
    evil = "../../evil"
    model = TinyLlama(extra={"general.name": evil})
    base = tmp_path / "base.gguf"
    extra = tensor("../../x.weight", np.zeros((4, 4)))
    base.write_bytes(gguf_bytes(model.metadata(), [*model.raw_tensors(), extra]))
    TinyAdapter().write(tmp_path / "a.gguf", model)
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    merge(base, {tmp_path / "a.gguf": 1.0}, folder / "out.gguf", max_split_bytes=10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "base.gguf", "in"]


def test_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is in the message, and what stood under the name stands there still."""
    base, (adapter,) = write(tmp_path, TinyLlama(), TinyAdapter())
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")

    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    for name in ("posix_fallocate", "pwrite", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"loragraph.tools.output.os.{name}", full)
            with pytest.raises(OutputError, match="No space left on device"):
                merge(base, {adapter: 1.0}, out)
        assert out.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 3


def test_folded_bases_are_refused(tmp_path: Path) -> None:
    """A plain change added to rotated weights would be another change: nothing is written."""
    model = TinyLlama()
    base = write_folded(model, Folding(), tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", model)
    with pytest.raises(UnsupportedError, match="folded"):
        merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "out.gguf")
    with pytest.raises(UnsupportedError, match="folded"):
        extract(base, base, tmp_path / "out.gguf", rank=4)
    assert not (tmp_path / "out.gguf").exists()
