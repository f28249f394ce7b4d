"""loragraph.convert: names, row orders, fused weights, experts, MLX, refusals, files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph import convert
from loragraph.adapters.convert import plan_conversion
from loragraph.adapters.gguf import read_adapter
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    ConfigError,
    UnsupportedError,
)
from loragraph.ggml.lib import load_library
from loragraph.tools.inspect import read_base_info
from tests.adapters.convert.folders import (
    GGUF_NAMES,
    MODULES,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    N_LAYER,
    N_ROT,
    N_VOCAB,
    layers,
    lora,
    normal,
    peft,
    safetensors_bytes,
    write_base,
)
from tests.reference.adapter import read_tensors

Deltas = dict[str, NDArray[np.float64]]


def deltas(path: Path, base: Path) -> Deltas:
    """What a converted file adds to each weight, (n_expert,) (n_out, n_in); it must load."""
    lib = load_library(None)
    out: Deltas = {}
    with read_adapter(lib, path, read_base_info(lib, base)) as adapter:
        for name, pair in adapter.pairs.items():
            a = adapter.array(pair.a).astype(np.float64)
            b = adapter.array(pair.b).astype(np.float64)
            product = a @ b.T if name == "token_embd.weight" else b @ a
            out[name] = adapter.effective_scale(name) * product
    return out


def permuted(values: NDArray[Any], n_head: int) -> NDArray[Any]:
    """Row by row: what stood at i + n_rot/2 of a head goes behind what stood at i."""
    n_rot = len(values) // n_head
    order = [
        head * n_rot + half * (n_rot // 2) + i
        for head in range(n_head)
        for i in range(n_rot // 2)
        for half in range(2)
    ]
    return values[order]


def product(tensors: Mapping[str, Any], module: str, scale: float = 2.0) -> NDArray[np.float64]:
    """scale · B A of a module, (n_out, n_in)."""
    a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
    out: NDArray[np.float64] = scale * (b.astype(np.float64) @ a.astype(np.float64))
    return out


def test_progress_reaches_the_whole_and_an_interruption_leaves_no_file(tmp_path: Path) -> None:
    """Bytes written grow up to those of all tensors; Ctrl-C in between leaves what was there."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "peft")
    seen: list[tuple[int, int]] = []
    path, _ = convert(folder, base, progress=lambda *pair: seen.append(pair))
    done = [one for one, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1][0] == seen[-1][1] == sum(a.nbytes for a in read_tensors(path).values())
    path.unlink()

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, base, progress=interrupt)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["base.gguf", "peft"]


@pytest.mark.parametrize(
    ("arch", "reorders"), [("llama", True), ("granite", True), ("qwen2", False), ("gemma3", False)]
)
def test_rows_are_in_the_order_of_the_family(arch: str, reorders: bool, tmp_path: Path) -> None:
    """q and k rows are reordered head by head for llama and granite, and nothing else is."""
    base = write_base(tmp_path / "base.gguf", arch)
    tensors = lora(layers())
    path, plan = convert(peft(tmp_path / "peft", tensors), base)
    assert path == tmp_path / "peft-f32.gguf"
    assert plan.llama_cpp == ""
    found = deltas(path, base)
    for il in range(N_LAYER):
        for module, name in GGUF_NAMES.items():
            wanted = product(tensors, f"model.layers.{il}.{module}")
            if reorders and name in ("attn_q", "attn_k"):
                wanted = permuted(wanted, N_HEAD if name == "attn_q" else N_HEAD_KV)
            np.testing.assert_allclose(found[f"blk.{il}.{name}.weight"], wanted, atol=1e-5)


@pytest.mark.parametrize("infix", ["", ".default", ".my-adapter"])
@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "base_model.model.model.language_model.model.", ""]
)
def test_names_are_found_in_any_wrapping(prefix: str, infix: str, tmp_path: Path) -> None:
    """PEFT's prefix, an adapter's name in the key, and multimodal wrappings all mean one module."""
    base = write_base(tmp_path / "base.gguf", "qwen2")
    modules = layers(("self_attn.q_proj",))
    if "language_model" in prefix:
        modules = {path.removeprefix("model."): shape for path, shape in modules.items()}
    plan = plan_conversion(peft(tmp_path / "p", lora(modules, 4, prefix, infix)), base)
    assert [target.target for target in plan.targets] == [
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
    ]


def test_a_fused_module_is_cut_for_a_base_that_is_not(tmp_path: Path) -> None:
    """qkv_proj and gate_up_proj give q, k, v, gate and up their own rows of lora_B."""
    base = write_base(tmp_path / "base.gguf", "llama")
    n_q, n_kv = N_HEAD * N_ROT, N_HEAD_KV * N_ROT
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
    tensors = lora({qkv: (n_q + 2 * n_kv, N_EMBD), gate_up: (2 * N_FF, N_EMBD)})
    path, _ = convert(peft(tmp_path / "peft", tensors), base)
    found = deltas(path, base)
    q, k, v = np.split(product(tensors, qkv), [n_q, n_q + n_kv])
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], permuted(q, N_HEAD), atol=1e-5)
    np.testing.assert_allclose(found["blk.0.attn_k.weight"], permuted(k, N_HEAD_KV), atol=1e-5)
    np.testing.assert_allclose(found["blk.0.attn_v.weight"], v, atol=1e-5)
    gate, up = np.split(product(tensors, gate_up), 2)
    np.testing.assert_allclose(found["blk.0.ffn_gate.weight"], gate, atol=1e-5)
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"], up, atol=1e-5)


def test_modules_are_joined_for_a_fused_base(tmp_path: Path) -> None:
    """q, k, v with unlike ranks and alphas become one pair of the fused weight, exactly."""
    base = write_base(tmp_path / "base.gguf", "phi3", fused=True)
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    modules = layers(names, 1)
    ranks = {"model.layers.0.self_attn.v_proj": 6}
    tensors = lora(modules, ranks)
    folder = peft(
        tmp_path / "peft", tensors, rank_pattern={"v_proj": 6}, alpha_pattern={"gate_proj": 3}
    )
    path, _ = convert(folder, base)
    found = deltas(path, base)
    n_q, n_kv = N_HEAD * N_ROT, N_HEAD_KV * N_ROT
    wanted = np.zeros((n_q + 2 * n_kv, N_EMBD))
    wanted[:n_q] = product(tensors, "model.layers.0.self_attn.q_proj")
    wanted[n_q + n_kv :] = product(tensors, "model.layers.0.self_attn.v_proj", 8 / 6)
    np.testing.assert_allclose(found["blk.0.attn_qkv.weight"], wanted, atol=2e-5)
    both = [
        product(tensors, "model.layers.0.mlp.gate_proj", 3 / 4),
        product(tensors, "model.layers.0.mlp.up_proj"),
    ]
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"], np.concatenate(both), atol=2e-5)


def test_experts_one_by_one_are_stacked(tmp_path: Path) -> None:
    """Modules of single experts become a stack; an expert that was not trained stays as it was."""
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True)
    head = "model.layers.1.mlp.experts"
    modules = {f"{head}.{e}.down_proj": (N_EMBD, N_FF) for e in (0, 2)}
    ranks = {f"{head}.2.down_proj": 2}
    tensors = lora(modules, ranks)
    folder = peft(tmp_path / "peft", tensors, rank_pattern={r"experts\.2\.down_proj": 2})
    path, plan = convert(folder, base)
    assert [target.target for target in plan.targets] == ["blk.1.ffn_down_exps.weight"]
    found = deltas(path, base)["blk.1.ffn_down_exps.weight"]
    assert found.shape == (N_EXPERT, N_EMBD, N_FF)
    np.testing.assert_allclose(found[0], product(tensors, f"{head}.0.down_proj"), atol=1e-5)
    np.testing.assert_array_equal(found[1], 0)
    np.testing.assert_allclose(found[2], product(tensors, f"{head}.2.down_proj", 4), atol=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
def test_packed_experts(swapped: bool, tmp_path: Path) -> None:
    """PEFT's target_parameters: experts outside in A and inside in B, gate_up cut, old form too.

    In the old form A's columns are the parameter's rows, so its factors are the other way round.
    """
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True)
    head = "base_model.model.model.layers.0.mlp.experts"
    rank, tensors, wanted = 4, {}, {}
    sizes = {"gate_up_proj": (2 * N_FF, N_EMBD), "down_proj": (N_EMBD, N_FF)}
    for i, (parameter, (n_out, n_in)) in enumerate(sizes.items()):
        a = normal(10 + i, N_EXPERT, rank, n_out if swapped else n_in)
        b = normal(20 + i, n_in if swapped else n_out, rank, N_EXPERT)
        key = f"{head}.base_layer" if parameter == "gate_up_proj" else head
        tensors[f"{key}.lora_A.weight"] = a.reshape(N_EXPERT * rank, -1)
        tensors[f"{key}.lora_B.weight"] = b.reshape(b.shape[0], -1)
        equation = "ore,eri->eio" if swapped else "ore,eri->eoi"
        wanted[parameter] = 2 * np.einsum(equation, b.astype(np.float64), a.astype(np.float64))
    folder = peft(
        tmp_path / "peft",
        tensors,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    path, _ = convert(folder, base)
    found = deltas(path, base)
    gate, up = np.split(wanted["gate_up_proj"], 2, axis=1)
    np.testing.assert_allclose(found["blk.0.ffn_gate_exps.weight"], gate, atol=1e-4)
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], up, atol=1e-4)
    np.testing.assert_allclose(found["blk.0.ffn_down_exps.weight"], wanted["down_proj"], atol=1e-4)


def mlx(folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    """An adapter folder as mlx_lm.lora leaves it."""
    folder.mkdir()
    (folder / "adapters.safetensors").write_bytes(safetensors_bytes(tensors))
    fields: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def test_mlx_factors_are_turned_and_the_scale_is_direct(tmp_path: Path) -> None:
    """MLX keeps lora_a (n_in, rank) and lora_b (rank, n_out), and multiplies by its scale."""
    base = write_base(tmp_path / "base.gguf")
    module = "model.layers.0.self_attn.k_proj"
    a, b = normal(1, N_EMBD, 4), normal(2, 4, N_HEAD_KV * N_ROT)
    folder = mlx(tmp_path / "mlx", {f"{module}.lora_a": a, f"{module}.lora_b": b})
    path, plan = convert(folder, base)
    wanted = 10 * (a.astype(np.float64) @ b).T
    assert plan.config.source == "mlx"
    found = deltas(path, base)["blk.0.attn_k.weight"]
    np.testing.assert_allclose(found, permuted(wanted, N_HEAD_KV), atol=1e-4)


def test_mlx_experts_and_table(tmp_path: Path) -> None:
    """MLX's switch layers are stacks of experts; its table's adapter is the tied head's too."""
    base = write_base(tmp_path / "base.gguf", "qwen3moe", experts=True, tied=True)
    head = "model.layers.0.mlp.switch_mlp.up_proj"
    a, b = normal(1, N_EXPERT, 4, N_EMBD), normal(2, N_EXPERT, N_FF, 4)
    table_a, table_b = normal(3, N_VOCAB, 4), normal(4, 4, N_EMBD)
    tensors = {
        f"{head}.lora_a": a,
        f"{head}.lora_b": b,
        "model.embed_tokens.lora_a": table_a,
        "model.embed_tokens.lora_b": table_b,
    }
    path, plan = convert(mlx(tmp_path / "mlx", tensors), base)
    assert plan.tied_output is True
    found = deltas(path, base)
    np.testing.assert_allclose(found["blk.0.ffn_up_exps.weight"], 10 * (b @ a), atol=1e-3)
    np.testing.assert_allclose(found["token_embd.weight"], 10 * (table_a @ table_b), atol=1e-3)


@pytest.mark.parametrize("kind", ["all", "lora_only"])
def test_a_trained_bias_goes_with_its_pair(kind: str, tmp_path: Path) -> None:
    """The difference to the base's bias is carried, in the base's row order."""
    n_q = N_HEAD * N_ROT
    old = normal(7, n_q)
    base = write_base(tmp_path / "base.gguf", extra={"blk.0.attn_q.bias": permuted(old, N_HEAD)})
    module = "model.layers.0.self_attn.q_proj"
    tensors = lora({module: (n_q, N_EMBD)})
    new = normal(8, n_q)
    tensors[f"base_model.model.{module}.base_layer.bias"] = new  # as PEFT names it
    path, plan = convert(peft(tmp_path / "peft", tensors, bias=kind), base)
    assert plan.own_keys == ("lora_bias",)
    stored = read_tensors(path)["blk.0.attn_q.weight.lora_bias"]
    scale = plan.alpha / 4
    np.testing.assert_allclose(stored * scale, permuted(new - old, N_HEAD), atol=1e-5)


def test_a_bias_that_was_not_trained_is_left_out_and_told(tmp_path: Path) -> None:
    """With bias = "none" a saved bias is the base's own."""
    base = write_base(tmp_path / "base.gguf")
    module = "model.layers.0.self_attn.q_proj"
    tensors = lora({module: (32, N_EMBD)})
    tensors[f"base_model.model.{module}.base_layer.bias"] = normal(1, 32)
    plan = plan_conversion(peft(tmp_path / "peft", tensors), base)
    assert plan.skipped == (f"base_model.model.{module}.base_layer.bias",)
    assert plan.own_keys == ()


@pytest.mark.parametrize("surplus", [64, 2])
@pytest.mark.parametrize("how", ["pair", "head", "whole"])
def test_rows_for_image_tokens_of_gemma_3(how: str, surplus: int, tmp_path: Path) -> None:
    """64 rows behind the vocabulary are cut off, any other surplus is another base."""
    base = write_base(tmp_path / "base.gguf", "gemma3")
    n, config = N_VOCAB + surplus, {}
    table, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    tensors = lora(layers(("self_attn.q_proj",)))
    if how == "pair":
        a, b = normal(1, 4, n), normal(2, N_EMBD, 4)
        tensors |= {f"{table}.lora_embedding_A": a, f"{table}.lora_embedding_B": b}
        target, wanted = "token_embd.weight", 2 * (b @ a).T
    elif how == "head":
        tensors |= lora({"lm_head": (n, N_EMBD)})
        target, wanted = "output.weight", product(tensors, "lm_head")
    else:
        whole = normal(3, n, N_EMBD)
        tensors |= {f"{head}.weight": whole}
        config = {"modules_to_save": ["lm_head"]}
        target, wanted = "output.weight", whole.copy()
        wanted[:N_VOCAB] -= read_tensors(base)["output.weight"]
    folder = peft(tmp_path / "peft", tensors, **config)
    if surplus != 64:
        with pytest.raises(AdapterMismatchError):
            convert(folder, base)
        return
    path, _ = convert(folder, base)
    np.testing.assert_allclose(deltas(path, base)[target], wanted[:N_VOCAB], atol=1e-5)


def test_a_folded_base_cannot_be_compared_with(tmp_path: Path) -> None:
    """Tokens trained whole need the base's rows, which a folded base has rotated."""
    metadata = {"prism.hadamard.version": 1}
    base = write_base(tmp_path / "base.gguf", metadata=metadata)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors = {**lora(layers()), name: normal(5, 1, N_EMBD)}
    folder = peft(tmp_path / "peft", tensors, trainable_token_indices=[3])
    with pytest.raises(UnsupportedError, match="folded base"):
        convert(folder, base)


def test_trained_tokens_are_a_pair_of_their_rank(tmp_path: Path) -> None:
    """Rows of the table that were trained replace the base's exactly."""
    base = write_base(tmp_path / "base.gguf")
    tensors = lora(layers(("self_attn.v_proj",)))
    rows = normal(5, 2, N_EMBD)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    folder = peft(tmp_path / "peft", {**tensors, name: rows}, trainable_token_indices=[3, 17])
    path, _ = convert(folder, base)
    table = read_tensors(base)["token_embd.weight"]
    wanted = table.astype(np.float64)
    wanted[[3, 17]] = rows
    np.testing.assert_allclose(deltas(path, base)["token_embd.weight"] + table, wanted, atol=1e-6)


def test_a_saved_table_that_was_not_trained_is_left_out_and_told(tmp_path: Path) -> None:
    """PEFT saves the table beside a pair of its: it is skipped, with a warning."""
    base = write_base(tmp_path / "base.gguf")
    tensors = lora(layers())
    tensors["base_model.model.model.embed_tokens.weight"] = normal(1, N_VOCAB, N_EMBD)
    plan = plan_conversion(peft(tmp_path / "peft", tensors), base)
    assert plan.skipped == ("base_model.model.model.embed_tokens.weight",)
    assert "saved but not trained" in " ".join(plan.warnings)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_repeated_by_peft(tied: bool, tmp_path: Path) -> None:
    """layer_replication fits a base with as many layers, and no other."""
    base = write_base(tmp_path / "base.gguf", tied=tied)
    plan = plan_conversion(peft(tmp_path / "a", layer_replication=[[0, 1], [0, 1]]), base)
    assert len(plan.targets) == 4
    with pytest.raises(AdapterMismatchError, match="model of 3 layers, the base has 2"):
        plan_conversion(peft(tmp_path / "b", layer_replication=[[0, 2], [1, 2]]), base)


def test_another_model_of_the_same_shape_is_told(tmp_path: Path) -> None:
    """Names that cannot mean one model give a warning: shapes alone cannot tell."""
    base = write_base(tmp_path / "base.gguf", name="Qwen2.5 Coder 1.5B Instruct")
    folder = peft(tmp_path / "peft", base_model_name_or_path="Qwen/Qwen2.5-Coder-1.5B")
    assert plan_conversion(folder, base).warnings == ()
    folder = peft(tmp_path / "peft", base_model_name_or_path="meta-llama/Llama-3.2-1B")
    (warning,) = plan_conversion(folder, base).warnings
    assert "trained on 'meta-llama/Llama-3.2-1B'" in warning
    assert "calls itself 'Qwen2.5 Coder 1.5B Instruct'" in warning


def test_unknown_fields_are_told(tmp_path: Path) -> None:
    """A field that nobody here knows is not passed over in silence."""
    folder = peft(tmp_path / "peft", use_next_idea={"x": 1}, other_idea=None)
    (warning,) = plan_conversion(folder, write_base(tmp_path / "base.gguf")).warnings
    assert "use_next_idea" in warning
    assert "other_idea" not in warning


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    """A value that the wanted type cannot hold is an error, not an infinity."""
    base = write_base(tmp_path / "base.gguf")
    module = "model.layers.0.self_attn.v_proj"
    tensors = lora({module: MODULES["self_attn.v_proj"]})
    tensors[f"base_model.model.{module}.lora_B.weight"][0, 0] = 1e5
    folder = peft(tmp_path / "peft", tensors)
    with pytest.raises(AdapterFormatError, match=r"leaves the range.*f32 or bf16"):
        convert(folder, base, outtype="f16")
    convert(folder, base, outtype="bf16")


def test_q8_0_falls_back_where_a_row_is_too_short(tmp_path: Path) -> None:
    """lora_a is Q8_0, lora_b, whose rows have the rank's length, is F16."""
    base = write_base(tmp_path / "base.gguf")
    path, _ = convert(peft(tmp_path / "peft"), base, outtype="q8_0")
    with read_adapter(load_library(None), path, None) as adapter:
        assert {(pair.a.type, pair.b.type) for pair in adapter.pairs.values()} == {(8, 1)}


def test_the_output_is_a_file_that_was_not_there_before(tmp_path: Path) -> None:
    """A folder, a missing folder and a type that is none are configuration errors."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "peft")
    with pytest.raises(ConfigError, match="got the folder"):
        convert(folder, base, tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        convert(folder, base, tmp_path / "x" / "y.gguf")
    with pytest.raises(ConfigError, match="expected f32, f16, bf16, q8_0"):
        convert(folder, base, outtype="q4_0")  # type: ignore[arg-type]
    path, _ = convert(folder, base, tmp_path / "a.gguf", dry_run=True)
    assert not path.exists()
    convert(folder, base, path)
    assert os.stat(path).st_mode & 0o400


@pytest.mark.parametrize("module", MODULES)
def test_rslora_is_alpha_over_the_root_of_the_rank(module: str, tmp_path: Path) -> None:
    """Every module's effective scale with use_rslora."""
    base = write_base(tmp_path / "base.gguf", "qwen2")
    tensors = lora(layers((module,), 1))
    path, _ = convert(peft(tmp_path / "peft", tensors, use_rslora=True), base)
    (found,) = deltas(path, base).values()
    wanted = product(tensors, f"model.layers.0.{module}", 8 / 2)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
