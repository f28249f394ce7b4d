"""Costs of a base and adapters, against sums over the files themselves and the known example."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GGMLType
from typer.testing import CliRunner

from loragraph.cli.main import app
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.errors import AdapterMismatchError, ConfigError
from loragraph.tools.plan import plan
from tests.tiny import TinyAdapter, TinyLlama


def header_only(path: Path, n_layer: int, n_embd: int, n_ff: int) -> Path:
    """A 7B model's F16 file as a hole: header and length, no weights."""
    names = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (n_embd, n_embd)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (n_embd, n_ff)),
        "ffn_down": (n_ff, n_embd),
    }
    tensors = [
        (f"blk.{il}.{name}.weight", ne) for il in range(n_layer) for name, ne in names.items()
    ]
    keys = {"block_count": n_layer, "embedding_length": n_embd, "attention.head_count": 32}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + len(keys))
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, value in keys.items():
        head += text(f"llama.{key}") + struct.pack("<II", 4, value)
    offset = 0
    for name, ne in tensors:
        head += text(name) + struct.pack("<IQQIQ", 2, *ne, 1, offset)
        offset += 2 * ne[0] * ne[1]
    head += bytes(-len(head) % 32)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + offset)
    return path


def test_the_known_example(tmp_path: Path) -> None:
    """32 layers of 4096 and 11008 with rank 16 on all seven: 40 M parameters, 80 MB, 0.6 %."""
    facts = plan(header_only(tmp_path / "7b.gguf", 32, 4096, 11008), ranks=[16])
    assert facts.base.params == 32 * (4 * 4096**2 + 3 * 4096 * 11008) == 6_476_005_376
    assert facts.base.nbytes == facts.base_bytes == 2 * facts.base.params
    (adapter,) = facts.adapters
    assert adapter.params == 32 * 16 * (8 * 4096 + 3 * (4096 + 11008)) == 39_976_960
    assert adapter.nbytes == 2 * adapter.params
    assert adapter.macs == adapter.params
    assert adapter.params / facts.base.params == pytest.approx(0.0062, abs=1e-4)
    assert facts.bytes_cell == 32 * 2 * 4096 * 2


def test_costs_of_files_are_sums_over_their_tensors(tmp_path: Path) -> None:
    """Parameters, bytes, multiply-adds and traffic of an adapter with all kinds of targets."""
    model = TinyLlama(weight_type=GGMLType.Q8_0, tied=True)
    base = model.write(tmp_path / "base.gguf")
    adapter = TinyAdapter(rank={"attn_q": 2, "ffn_up": 8}, embeddings=True, dtype=GGMLType.F16)
    arrays = adapter.write(tmp_path / "a.gguf", model)
    facts = plan(base, [tmp_path / "a.gguf"], n_ctx=100)
    (cost,) = facts.adapters
    table = arrays.pairs["token_embd.weight"]
    assert cost.params == sum(a.size + b.size for a, b in arrays.pairs.values())
    assert cost.params_layers == cost.params - table[0].size - table[1].size
    assert cost.ranks == (2, 8)
    assert cost.macs == cost.params_layers + table[1].size
    assert cost.bytes_token == 2 * (cost.params_layers + table[0][0].size + table[1].size)
    matrices = model.matrices()
    head = model.n_vocab * model.n_embd
    assert facts.base.params == sum(a * b for a, b in matrices.values())
    assert facts.base.macs == facts.base.params  # the tied head is computed with
    assert facts.base.nbytes == sum(a * b // 32 * 34 for a, b in matrices.values())
    assert facts.base.bytes_token == facts.base.nbytes + model.n_embd // 32 * 34
    assert facts.base.params_layers == facts.base.params - head


def test_memory_is_what_loading_takes(tmp_path: Path) -> None:
    """Bytes of the adapter and of a cell are those of the run time."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    TinyAdapter(rank=3).write(tmp_path / "a.gguf", model)
    facts = plan(base, [tmp_path / "a.gguf"])
    with Model.load(base, n_threads=1) as loaded:
        adapter = loaded.load_adapter(tmp_path / "a.gguf")
        assert facts.adapters[0].nbytes == adapter.nbytes
        with Context(loaded, n_ctx=256) as context:
            assert context.nbytes["cells"] == pytest.approx(256 * facts.bytes_cell, rel=0.01)


def test_experts_cost_what_a_token_uses(tmp_path: Path) -> None:
    """Two of eight experts: a quarter of the stack's work and traffic."""
    import numpy as np

    from tests.gguf_bytes import Value, gguf_bytes, tensor

    keys: dict[str, Value] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
    }
    stack = tensor("blk.0.ffn_up_exps.weight", np.zeros((8, 96, 64)))
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys, [stack]))
    facts = plan(tmp_path / "m.gguf", ranks=[4])
    assert (facts.base.params, facts.base.macs) == (8 * 96 * 64, 2 * 96 * 64)
    assert facts.base.bytes_token == 4 * 2 * 96 * 64
    (cost,) = facts.adapters
    assert (cost.params, cost.macs) == (8 * 4 * 160, 2 * 4 * 160)


def test_budget(tmp_path: Path) -> None:
    """What is left beside base and cells, divided by an adapter's size; never below zero."""
    model = TinyLlama()
    base = model.write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", model)
    small = plan(base, [tmp_path / "a.gguf"], budget_bytes=1000)
    assert small.left_bytes < 0
    assert small.fitting(small.adapters[0]) == 0
    needed = small.base_bytes + small.cells_bytes
    size = small.adapters[0].nbytes
    exact = plan(base, [tmp_path / "a.gguf"], budget_bytes=needed + 3 * size)
    assert exact.fitting(exact.adapters[0]) == 3
    assert exact.to_dict()["adapters"][0]["n_fitting"] == 3


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for people, JSON for programs; without adapters some ranks are supposed."""
    model = TinyLlama()
    model.write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", model)
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, ["plan", "base.gguf", *args], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    text = run("--lora", "a.gguf", "--budget", "2M", "-c", "512")
    for part in ("a.gguf", "left for adapters", "512 cells", "adapters like a.gguf"):
        assert part in text
    facts = json.loads(run("--json"))
    assert [cost["ranks"][1] for cost in facts["adapters"]] == [8, 16, 64]


def test_mistakes(tmp_path: Path) -> None:
    """An adapter of another base and numbers out of range are refused."""
    base = TinyLlama().write(tmp_path / "base.gguf")
    TinyAdapter().write(tmp_path / "a.gguf", TinyLlama(n_embd=128))
    with pytest.raises(AdapterMismatchError):
        plan(base, [tmp_path / "a.gguf"])
    with pytest.raises(ConfigError):
        plan(base, ranks=[0])
    with pytest.raises(ConfigError):
        plan(base, n_ctx=0)
