"""Headers of the families with experts: what is missing or absurd is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loragraph.engine.model import Model
from loragraph.errors import FormatError, GGUFError, UnsupportedError
from tests.gguf_bytes import Value, write_gguf
from tests.numerics.compare import nmse
from tests.numerics.runs import open_context, run
from tests.reference.experts import ReferenceExperts
from tests.tiny import TinyModel
from tests.tiny_experts import (
    TINY_EXPERTS,
    TinyDeepSeek2,
    TinyExperts,
    TinyGptOss,
    TinyGraniteMoE,
    TinyMixtral,
    TinyQwen2MoE,
    TinyQwen3MoE,
)

NEEDED: Mapping[str, tuple[str, ...]] = {
    "llama": ("expert_used_count", "feed_forward_length"),
    "qwen2moe": ("expert_count", "expert_used_count"),
    "qwen3moe": ("expert_count", "expert_used_count"),
    "granitemoe": ("expert_count", "expert_used_count", "logit_scale", "feed_forward_length"),
    "deepseek2": (
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_count",
        "attention.kv_lora_rank",
        "attention.value_length_mla",
    ),
    "gpt-oss": (
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "attention.sliding_window",
    ),
}
"""Keys without which a model of the family cannot be read, beside those that all families need."""

OPTIONAL_TENSORS = (".bias", "output.weight")


def load(path: Path) -> None:
    """Loads and closes."""
    Model.load(path, n_threads=1).close()


def written(model: TinyModel, path: Path, *, without: str) -> Path:
    """The model without a tensor or a key `<arch>.<name>` of this name."""
    key = f"{model.arch}.{without}"
    metadata = {name: value for name, value in model.metadata().items() if name != key}
    tensors = [one for one in model.raw_tensors() if one.name != without]
    return write_gguf(path, metadata, tensors)


def one_of_each_tensor(model: TinyModel) -> Iterator[str]:
    """Names of the last layer and of no layer."""
    last = f"blk.{model.n_layer - 1}."
    for name in model.arrays:
        if (name.startswith(last) or not name.startswith("blk.")) and not name.endswith(
            OPTIONAL_TENSORS
        ):
            yield name


@pytest.mark.parametrize("arch", TINY_EXPERTS)
def test_each_missing_tensor_is_named(arch: str, tmp_path: Path) -> None:
    """A file without one of its tensors: GGUFError with the tensor's name."""
    model = TINY_EXPERTS[arch]()
    for name in one_of_each_tensor(model):
        with pytest.raises(GGUFError, match="missing tensor") as caught:
            load(written(model, tmp_path / "m.gguf", without=name))
        assert name in str(caught.value)


@pytest.mark.parametrize(("arch", "key"), [(a, k) for a, keys in NEEDED.items() for k in keys])
def test_each_missing_key_is_named(arch: str, key: str, tmp_path: Path) -> None:
    """A file without a key of the family: an error with the key's name."""
    with pytest.raises(FormatError) as caught:
        load(written(TINY_EXPERTS[arch](), tmp_path / "m.gguf", without=key))
    assert key.rpartition(".")[-1] in str(caught.value)


ABSURD: Mapping[str, tuple[TinyExperts, dict[str, Value], str]] = {
    "more used than there are": (TinyMixtral(), {"expert_used_count": 7}, "expert_used_count"),
    "no experts a token": (TinyQwen3MoE(), {"expert_used_count": 0}, "expert_used_count"),
    "too many experts": (TinyQwen2MoE(), {"expert_count": 1 << 20}, "expert_count"),
    "another shared width": (
        TinyQwen2MoE(),
        {"expert_shared_feed_forward_length": 48},
        "ffn_up_shexp.weight.*expected sizes",
    ),
    "another number of experts": (
        TinyGraniteMoE(),
        {"expert_count": 5},
        "ffn_gate_inp.weight.*expected sizes",
    ),
    "a window of none": (TinyGptOss(), {"attention.sliding_window": 0}, "sliding_window"),
    "groups that do not divide": (TinyDeepSeek2(), {"expert_group_count": 4}, "equal size"),
    "all groups used": (
        TinyDeepSeek2(),
        {"expert_group_count": 3, "expert_group_used_count": 3},
        "expert_group_used_count",
    ),
    "two latent K/V heads": (TinyDeepSeek2(), {"attention.head_count_kv": 2}, "one K/V head"),
    "another latent width": (TinyDeepSeek2(), {"attention.key_length": 48}, "key_length and value"),
    "a head that turns whole": (
        TinyDeepSeek2(),
        {"attention.key_length_mla": 8},
        "more than the 8 values that turn",
    ),
    "shared K/V heads without a latent cell": (
        TinyDeepSeek2(absorbed=False),
        {"attention.head_count_kv": 2},
        "a K/V head for each of 4 heads",
    ),
    "more dense layers than layers": (
        TinyDeepSeek2(),
        {"leading_dense_block_count": 4},
        "leading_dense_block_count",
    ),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_numbers_are_refused(case: str, tmp_path: Path) -> None:
    """Numbers that contradict each other or the tensors: an error that says which."""
    model, keys, message = ABSURD[case]
    extra = {f"{model.arch}.{name}": value for name, value in keys.items()}
    with pytest.raises(FormatError, match=message):
        load(replace(model, extra=extra).write(tmp_path / "m.gguf"))


UNSUPPORTED: Mapping[str, tuple[TinyExperts, dict[str, Value], str]] = {
    "temperature": (TinyDeepSeek2(), {"attention.temperature_scale": 0.1}, "temperature_scale"),
    "further tokens": (TinyDeepSeek2(), {"nextn_predict_layers": 1}, "nextn_predict_layers"),
    "gating": (TinyDeepSeek2(), {"expert_gating_func": 4}, "expert_gating_func"),
    "unlike widths": (TinyMixtral(), {"feed_forward_length": [32, 64]}, "unlike widths"),
    "images": (TinyGraniteMoE(), {"deepstack_mapping": [0, 1]}, "deepstack_mapping"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_variants_that_are_not_implemented_are_refused(case: str, tmp_path: Path) -> None:
    """What would change the forward pass and is not implemented: UnsupportedError that names it."""
    model, keys, message = UNSUPPORTED[case]
    extra = {f"{model.arch}.{name}": value for name, value in keys.items()}
    with pytest.raises(UnsupportedError, match=message):
        load(replace(model, extra=extra).write(tmp_path / "m.gguf"))


def test_a_zero_gate_of_the_shared_expert_is_a_half(tmp_path: Path) -> None:
    """A shared expert whose gate is 0 counts half; llama.cpp divides 0 by 0 there."""
    model = TinyQwen2MoE()
    for il in range(model.n_layer):
        model.arrays[f"blk.{il}.ffn_gate_inp_shexp.weight"][:] = 0
    path = model.write(tmp_path / "m.gguf")
    with Model.load(path, n_threads=1) as loaded, open_context(loaded) as context:
        logits = run(context, [5, 6, 7], {})
    expected = ReferenceExperts.read(path, 256).logits([5, 6, 7])
    assert nmse(logits, expected) <= 1e-12
