"""Damaged and hostile adapters: only LoragraphError comes out, in bounded time and memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragraph import LoragraphError, convert
from loragraph.adapters.convert import plan_conversion
from tests.adapters.convert.folders import (
    N_EMBD,
    PEFT_CONFIG,
    bf16,
    layers,
    lora,
    normal,
    peft,
    raw_safetensors,
    write_base,
)

FIELDS = [
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora",
    "bias", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
    "layer_replication", "alora_invocation_tokens", "ensure_weight_tying", "init_lora_weights",
    "base_model_name_or_path", "use_qalora", "fan_in_fan_out", "lora_parameters",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["q_proj", "all-linear", "LORA", "embed_tokens", ".*", "(", "a" * 2000]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One base for all examples."""
    return write_base(tmp_path_factory.mktemp("hostile") / "base.gguf")


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_configuration_gives_a_plan_or_an_error(
    changes: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    """Fields of any type and value."""
    folder = peft(tmp_path / "peft")
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **changes}))
    try:
        plan = plan_conversion(folder, base)
    except LoragraphError:
        return
    assert plan.targets


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    position=st.integers(0, 1 << 12),
    value=st.integers(0, 255),
    which=st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]),
)
def test_flipped_bytes_give_a_file_or_an_error(
    position: int, value: int, which: str, base: Path, tmp_path: Path
) -> None:
    """A byte of the configuration or of the weights is another one."""
    folder = peft(tmp_path / "peft", lora(layers(("self_attn.q_proj",), 1)))
    data = bytearray((folder / which).read_bytes())
    data[position % len(data)] = value
    (folder / which).write_bytes(bytes(data))
    out = tmp_path / "out.gguf"
    out.unlink(missing_ok=True)
    try:
        convert(folder, base, out)
    except LoragraphError:
        assert not out.exists()
    else:
        assert out.exists()


NAMES = [
    "", ".", "..", "../../etc/passwd", "lora_A", ".lora_A.weight", "a.lora_A.weight.weight",
    "base_model.model.", "model.layers.99999999999999999999.self_attn.q_proj.lora_A.weight",
    "model.layers.-1.self_attn.q_proj.lora_A.weight", "blk.0.attn_q.weight.lora_a",
    "model.layers.0.mlp.experts.9999999.up_proj.lora_A.weight", "x" * 1000 + ".lora_A.weight",
    "a.base_layer.base_layer.base_layer.lora_A.weight", "\u202e.lora_A.weight",
    "model.layers.0.self_attn.q_proj.lora_A.\u00e9.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_name_is_an_error(name: str, base: Path, tmp_path: Path) -> None:
    """Paths, numbers without end, nested wrappers: refused, nothing is written anywhere."""
    header = {name: {"dtype": "F32", "shape": [1, N_EMBD], "data_offsets": [0, 4 * N_EMBD]}}
    folder = peft(tmp_path / "peft")
    data = raw_safetensors(json.dumps(header).encode(), bytes(4 * N_EMBD))
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(LoragraphError):
        convert(folder, base, tmp_path / "out.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


def test_many_tensors_take_bounded_time_and_memory(base: Path, tmp_path: Path) -> None:
    """20,000 empty entries are refused without much memory."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {f"model.layers.0.self_attn.q_proj{i}.lora_A.weight": entry for i in range(20_000)}
    folder = peft(tmp_path / "peft")
    data = raw_safetensors(json.dumps(header).encode())
    (folder / "adapter_model.safetensors").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(LoragraphError):
            plan_conversion(folder, base)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data)
    finally:
        tracemalloc.stop()


def test_an_expert_without_end_is_refused(tmp_path: Path) -> None:
    """An expert's number beyond the base's count is a mismatch."""
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True)
    modules = {"model.layers.0.mlp.experts.99.down_proj": (N_EMBD, 48)}
    with pytest.raises(LoragraphError, match="expert 99"):
        convert(peft(tmp_path / "peft", lora(modules)), base, tmp_path / "out.gguf")


def test_values_of_any_type_are_the_same_adapter(base: Path, tmp_path: Path) -> None:
    """BF16, F16 and F64 files of exactly representable values convert to the same bytes."""
    module = "base_model.model.model.layers.0.self_attn.v_proj"
    a, b = np.round(4 * normal(1, 4, N_EMBD)) / 4, np.round(4 * normal(2, 16, 4)) / 4
    makers: tuple[Callable[[Any], Any], ...] = (bf16, np.float16, np.float32, np.float64)
    files = []
    for i, make in enumerate(makers):
        tensors = {f"{module}.lora_A.weight": make(a), f"{module}.lora_B.weight": make(b)}
        path, _ = convert(peft(tmp_path / "peft", tensors), base, tmp_path / f"{i}.gguf")
        files.append(path.read_bytes())
    assert len(set(files)) == 1
