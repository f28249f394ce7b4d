"""Adapters that PEFT trained, converted and merged: the merged file gives PEFT's logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.errors import ConfigError, InvalidRequestError, UnsupportedError
from loragraph.tools.combine import combine_files
from loragraph.tools.merge import merge
from loragraph.tools.merge_vectors import OPTIONAL
from loragraph.tools.resize import resize_file
from tests.adapters.convert.test_golden import ABOUT, ALORA, base_of, converted, expected
from tests.gguf_bytes import tensor, write_gguf
from tests.numerics.compare import nmse
from tests.numerics.runs import EXACT, Logits, libllama_logits, loragraph_logits, random_tokens
from tests.reference.adapter import read_tensors
from tests.tiny import TinyAdapter, TinyLlama, write_adapter_raw
from tests.tiny_experts import TINY_EXPERTS
from tests.tiny_families import TINY_FAMILIES

BOUND = 1e-11


def of_file(path: Path, name: str) -> Logits:
    """What a merged file computes for a variant's first prompt."""
    return loragraph_logits(path, [], [()], ABOUT[name]["prompts"][0], EXACT)[()]


@pytest.mark.parametrize("name", [name for name in ABOUT if name != ALORA])
def test_merged_variants_give_pefts_logits(name: str, tmp_path: Path) -> None:
    """DoRA, biases, whole modules, tied and untied heads: in loragraph and in libllama."""
    path, _ = converted(name, tmp_path)
    merge(base_of(name), {path: 1.0}, tmp_path / "merged.gguf")
    assert nmse(of_file(tmp_path / "merged.gguf", name), expected(name)[0]) <= BOUND
    prompt = ABOUT[name]["prompts"][0]
    logits = libllama_logits(tmp_path / "merged.gguf", [], [()], prompt, EXACT)[()]
    assert nmse(logits, expected(name)[0]) <= BOUND


def test_an_alora_is_refused(tmp_path: Path) -> None:
    """No fixed weight is active from the invocation on alone."""
    path, _ = converted(ALORA, tmp_path)
    with pytest.raises(UnsupportedError, match="aLoRA"):
        merge(base_of(ALORA), {path: 1.0}, tmp_path / "merged.gguf")


@pytest.mark.parametrize(
    "name",
    ["dora", "dora_head", "lora_bias", "norms", "qwen2_bias_alone", "qwen3_norms", "gemma3_norms"],
)
def test_vectors_follow_the_user_scale(name: str, tmp_path: Path) -> None:
    """At any scale, and beside another adapter, the merged file is the run time."""
    path, _ = converted(name, tmp_path)
    base = base_of(name)
    scales = (0.6, -0.3)
    other, _ = converted("plain" if base == base_of("plain") else name, tmp_path, "f16")
    second = tmp_path / "second.gguf"
    second.write_bytes(other.read_bytes())
    path, _ = converted(name, tmp_path)
    merge(base, zip((path, second), scales, strict=True), tmp_path / "merged.gguf")
    prompt = ABOUT[name]["prompts"][0]
    run_time = loragraph_logits(base, [path, second], [scales], prompt, EXACT, lowering="routed")
    assert nmse(of_file(tmp_path / "merged.gguf", name), run_time[scales]) <= BOUND


def test_resize_keeps_vectors(tmp_path: Path) -> None:
    """At full rank the resized file of a DoRA, biases or norms still gives PEFT's logits."""
    for name in ("dora", "lora_bias", "norms", "qwen2_bias_alone"):
        path, _ = converted(name, tmp_path)
        resize_file(path, tmp_path / "r.gguf", rank=4096)
        prompt = ABOUT[name]["prompts"][0]
        logits = loragraph_logits(
            base_of(name), [tmp_path / "r.gguf"], [(1.0,)], prompt, EXACT, lowering="routed"
        )[(1.0,)]
        assert nmse(logits, expected(name)[0]) <= BOUND


def test_combine_carries_biases_and_magnitudes(tmp_path: Path) -> None:
    """A bias is summed with its scale; a DoRA alone still gives PEFT's logits."""
    bias, _ = converted("lora_bias", tmp_path)
    dora, _ = converted("dora", tmp_path)
    combine_files({bias: 0.5}, tmp_path / "c.gguf")
    prompt = ABOUT["lora_bias"]["prompts"][0]
    half, combined = (
        loragraph_logits(
            base_of("lora_bias"), [path], [(scale,)], prompt, EXACT, lowering="routed"
        )[(scale,)]
        for path, scale in ((bias, 0.5), (tmp_path / "c.gguf", 1.0))
    )
    assert nmse(combined, half) <= BOUND
    combine_files({dora: 1.0}, tmp_path / "d.gguf")
    prompt = ABOUT["dora"]["prompts"][0]
    logits = loragraph_logits(
        base_of("dora"), [tmp_path / "d.gguf"], [(1.0,)], prompt, EXACT, lowering="routed"
    )[(1.0,)]
    assert nmse(logits, expected("dora")[0]) <= BOUND


@pytest.mark.parametrize("name", ["norms", "ln_tuning", "qwen2_bias_alone"])
def test_combine_sums_vectors_that_have_no_pair(name: str, tmp_path: Path) -> None:
    """Of one file twice, at unlike scales: what both do together at run time."""
    path, _ = converted(name, tmp_path)
    second = copy_of(path)
    report = combine_files({path: 0.75, second: -0.5}, tmp_path / "c.gguf")
    assert report.nbytes == (tmp_path / "c.gguf").stat().st_size
    prompt = ABOUT[name]["prompts"][0]
    quarter, combined = (
        loragraph_logits(base_of(name), [one], [(scale,)], prompt, EXACT, lowering="routed")[
            (scale,)
        ]
        for one, scale in ((path, 0.25), (tmp_path / "c.gguf", 1.0))
    )
    assert nmse(combined, quarter) <= BOUND


def test_resize_needs_a_pair(tmp_path: Path) -> None:
    """Norms alone have no rank."""
    path, _ = converted("ln_tuning", tmp_path)
    with pytest.raises(ConfigError, match="no low-rank pair"):
        resize_file(path, tmp_path / "r.gguf", rank=1)


@pytest.mark.parametrize("kind", ["keep", "f16", "q8_0"])
def test_norms_are_merged_into_files_of_any_type(kind: str, tmp_path: Path) -> None:
    """A norm stays F32, and is the sum to f32 rounding."""
    path, _ = converted("norms", tmp_path)
    merge(base_of("norms"), {path: 0.5}, tmp_path / "merged.gguf", type=kind)
    merged, base = (read_tensors(one) for one in (tmp_path / "merged.gguf", base_of("norms")))
    for name, change in read_tensors(path).items():
        if name.endswith(".lora_delta"):
            target = name.removesuffix(".lora_delta")
            wanted = base[target].astype(np.float64) + 0.5 * change.astype(np.float64)
            np.testing.assert_array_equal(merged[target], wanted.astype(np.float32))


def test_a_new_bias_without_a_pair(tmp_path: Path) -> None:
    """Where the family reads one it becomes a tensor; where it reads none it is refused."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    new = np.linspace(-1, 1, model.n_embd, dtype=np.float32)
    for target, fits in (("blk.1.attn_q", True), ("output", False)):
        values = new if fits else np.ones(model.n_vocab, np.float32)
        path = write_adapter_raw(
            tmp_path / "a.gguf", TinyAdapter().keys(), {f"{target}.weight.lora_bias": values}
        )
        if not fits:
            with pytest.raises(UnsupportedError, match=rf"no tensor {target}\.bias"):
                merge(base, {path: 1.0}, tmp_path / "refused.gguf")
            continue
        merge(base, {path: 0.5}, tmp_path / "merged.gguf")
        np.testing.assert_array_equal(
            read_tensors(tmp_path / "merged.gguf")[f"{target}.bias"], new / 2
        )
        tokens = random_tokens(12)
        run_time = loragraph_logits(base, [path], [(0.5,)], tokens, EXACT)[(0.5,)]
        for logits in (loragraph_logits, libllama_logits):
            merged = logits(tmp_path / "merged.gguf", [], [()], tokens, EXACT)[()]
            assert nmse(merged, run_time) <= BOUND


@pytest.mark.parametrize("arch", OPTIONAL)
def test_every_family_reads_the_biases_that_are_merged(arch: str, tmp_path: Path) -> None:
    """New biases of all weights that the table names: run time, merged, and libllama agree."""
    model = {**TINY_EXPERTS, **TINY_FAMILIES}[arch]()
    base = model.write(tmp_path / "base.gguf")
    rng = np.random.default_rng(1)
    own = {
        f"{name}.lora_bias": (0.3 * rng.standard_normal(shape[0])).astype(np.float32)
        for name, shape in model.matrices().items()
        if name.rsplit(".", 2)[-2] in OPTIONAL[arch] and len(shape) == 2
    }
    assert len(own) >= model.n_layer
    path = write_adapter_raw(tmp_path / "a.gguf", TinyAdapter().keys(arch), own)
    merge(base, {path: 1.0}, tmp_path / "merged.gguf")
    tokens = random_tokens(12)
    run_time = loragraph_logits(base, [path], [(1.0,)], tokens, EXACT)[(1.0,)]
    for logits in (loragraph_logits, libllama_logits):
        merged = logits(tmp_path / "merged.gguf", [], [()], tokens, EXACT)[()]
        assert nmse(merged, run_time) <= BOUND


@pytest.mark.parametrize("apart", [True, False], ids=["three biases", "one bias"])
def test_a_bias_of_a_fused_weight(apart: bool, tmp_path: Path) -> None:
    """It is added to the biases that the base has, of q, k and v apart or of all."""
    model = TinyLlama(fused_qkv=True, attn_bias=True, biases_apart=apart)
    base = model.write(tmp_path / "base.gguf")
    name = "blk.1.attn_qkv"
    values = np.linspace(-1, 1, model.matrices()[f"{name}.weight"][0], dtype=np.float32)
    path = write_adapter_raw(
        tmp_path / "a.gguf", TinyAdapter().keys(), {f"{name}.weight.lora_bias": values}
    )
    merge(base, {path: 0.5}, tmp_path / "merged.gguf")
    assert read_tensors(tmp_path / "merged.gguf").keys() == read_tensors(base).keys()
    tokens = random_tokens(12)
    run_time = loragraph_logits(base, [path], [(0.5,)], tokens, EXACT)[(0.5,)]
    merged = loragraph_logits(tmp_path / "merged.gguf", [], [()], tokens, EXACT)[()]
    assert nmse(merged, run_time) <= BOUND


def test_a_scale_that_overflows_a_vector(tmp_path: Path) -> None:
    """Refused before a file is written."""
    path, _ = converted("ln_tuning", tmp_path)
    with pytest.raises(InvalidRequestError, match="a scale is too large"):
        merge(base_of("ln_tuning"), {path: 1e300}, tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists()


def copy_of(path: Path) -> Path:
    """The same file under another name."""
    copy = path.with_name("copy.gguf")
    copy.write_bytes(path.read_bytes())
    return copy


def test_dora_on_quantised_bases_and_weights_with_factors(tmp_path: Path) -> None:
    """Merged as f32, a DoRA adapter on a Q8_0 base, or on weights with w_s, is the run time."""
    model = TinyLlama()
    plain = TinyAdapter(rank=4, targets=("attn_q", "ffn_down"))
    for number, base_model in enumerate(
        (replace(model, weight_type=GGMLType.Q8_0), replace(model, scales=True))
    ):
        base = base_model.write(tmp_path / f"base{number}.gguf")
        weights = read_tensors(base)
        tensors = plain.raw_tensors(model)
        for name, arrays in plain.arrays(model).pairs.items():
            n_out = len(arrays[1])
            length = (weights[name] ** 2).sum(axis=1) ** 0.5
            tensors.append(tensor(f"{name}.lora_magnitude", 1.1 * length[:n_out]))
        path = write_gguf(tmp_path / "dora.gguf", plain.keys(), tensors)
        merge(base, {path: 0.7}, tmp_path / "merged.gguf", type="f32")
        tokens = random_tokens(16)
        run_time = loragraph_logits(base, [path], [(0.7,)], tokens, EXACT, lowering="routed")
        merged = loragraph_logits(tmp_path / "merged.gguf", [], [()], tokens, EXACT)[()]
        # On Q8_0 the run time rounds activations, an F32 file does not.
        assert nmse(merged, run_time[(0.7,)]) < (1e-3 if number == 0 else 1e-10)


def test_a_bias_that_the_family_has_no_place_for(tmp_path: Path) -> None:
    """The head has no bias in this family: refused with the reason, nothing written."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    adapter = TinyAdapter(targets=(), output=True)
    tensors = [
        *adapter.raw_tensors(model),
        tensor("output.weight.lora_bias", [0.5] * model.n_vocab),
    ]
    path = write_gguf(tmp_path / "a.gguf", adapter.keys(), tensors)
    with pytest.raises(UnsupportedError, match=r"no tensor output\.bias"):
        merge(base, {path: 1.0}, tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists()
